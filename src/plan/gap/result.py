"""What `measured=FILE` answers: the gap between an estimate and what was measured, in parts.

Every gap is measured less estimated, in bytes on the fullest GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from src.spec import Layout, Method
from src.units import Levels


class Kind(StrEnum):
    """What the file holds: a row of `src.record`, or a memory snapshot of PyTorch."""

    ROW = "row"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelGap:
    """One level.

    Attributes:
        level: which bytes.
        estimate_bytes: of the job that was asked.
        settled_bytes: of the same job with the row's settings; None where that cannot be answered.
        measured_bytes: None where the level was not seen.
    """

    level: str
    estimate_bytes: int
    settled_bytes: int | None
    measured_bytes: int | None

    @property
    def gap_bytes(self) -> int | None:
        """Measured less estimated."""
        return None if self.measured_bytes is None else self.measured_bytes - self.estimate_bytes

    @property
    def left_bytes(self) -> int | None:
        """Measured less what is estimated with the row's settings: what these do not explain."""
        if self.measured_bytes is None or self.settled_bytes is None:
            return None
        return self.measured_bytes - self.settled_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingGap:
    """A setting that the row has otherwise.

    Attributes:
        key: as it is typed; `loop.*` are options of the training loop that no key sets.
        asked: its value in the question.
        measured: its value in the row.
        moved_bytes: what the estimate changes by where only this is as in the row; None where the
            estimator has no answer to that.
    """

    key: str
    asked: str
    measured: str
    moved_bytes: Levels | None


@dataclass(frozen=True, kw_only=True, slots=True)
class InstantGap:
    """Most bytes of tensors within one instant; None on a side that does not know it."""

    instant: str
    estimate_bytes: int | None
    measured_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartGap:
    """Bytes of tensors that estimate and measurement can both tell.

    Attributes:
        part: its name.
        terms: the ledger's terms that belong to it, with their bytes at the peak.
        measured_bytes: None where the measurement cannot tell them.
    """

    part: str
    terms: Mapping[str, int]
    measured_bytes: int | None

    @property
    def estimate_bytes(self) -> int:
        """All its terms."""
        return sum(self.terms.values())

    @property
    def gap_bytes(self) -> int | None:
        """Measured less estimated."""
        return None if self.measured_bytes is None else self.measured_bytes - self.estimate_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What the settings do not explain.

    Attributes:
        kind: `tensors`, `fragmentation`, `outside`: parts of the gap at the level device; others
            are facts of the run.
        gap_bytes: how much of the gap that is; None for a fact.
        words: what is known of it.
    """

    kind: str
    gap_bytes: int | None
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Estimate against measurement.

    Attributes:
        file: as it was typed.
        kind: what it holds.
        id: of the row; of a snapshot the GPU's number.
        source: `measured`, `published` or `simulated`; of a snapshot `recorded`.
        outcome: of the row; of a snapshot `ok`, or `oom` where a request failed.
        method, layout, micro_batch: the estimate that is explained.
        levels: allocated, reserved, device.
        settings: those that differ, the ones that move most bytes first.
        instants: of the estimate with the row's settings.
        instant: the one whose parts are told.
        parts: the largest gap first.
        unattributed_bytes: measured bytes at that instant that belong to no part; None where the
            allocated level was not seen.
        causes: what settings do not explain.
        versions: library -> version, of the run.
    """

    file: str
    kind: Kind
    id: str
    source: str
    outcome: str
    method: Method
    layout: Layout
    micro_batch: int
    levels: tuple[LevelGap, ...]
    settings: tuple[SettingGap, ...]
    instants: tuple[InstantGap, ...]
    instant: str
    parts: tuple[PartGap, ...]
    unattributed_bytes: int | None
    causes: tuple[Cause, ...]
    versions: Mapping[str, str]

    def level(self, name: str) -> LevelGap:
        """The level of a name."""
        return next(level for level in self.levels if level.level == name)
