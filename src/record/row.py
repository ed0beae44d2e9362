"""One step that was run: what was asked, what came of it, where and when."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from src.errors import UserError
from src.record.reading import Reader

SCHEMA_VERSION = 1
"""Of a row's JSON form. No key is renamed or gets another meaning without a new one."""

LEVELS = ("allocated", "reserved", "device")

LENGTHS, VARYING = "lengths", "varying"
"""In a row's environment: its run's sequences were of any length up to the case's."""

_ID_LENGTH = 16
_SIMULATED = "simulated"


class Outcome(StrEnum):
    """What came of the step.

    `oom`: it does not fit. `timeout`: it was ended at its time limit. `crashed`: its process died,
    or the step cannot be run; `message` says how. `invalid`: other processes used the GPU.
    """

    OK = "ok"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INVALID = "invalid"


class Source(StrEnum):
    """Where a row comes from: a CUDA GPU here, someone else's publication, or the dry run."""

    MEASURED = "measured"
    PUBLISHED = "published"
    SIMULATED = "simulated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """How a row came to be.

    Attributes:
        campaign: name of the campaign.
        started: when the step's process was started, ISO 8601 with time zone.
        duration_s: seconds until its answer was there.
        git_commit: of the code that ran; None where that is not known.
        url: where it was published; None for rows of one's own.
    """

    campaign: str
    started: str
    duration_s: float
    git_commit: str | None = None
    url: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One GPU of a step on several.

    Attributes:
        rank: its number.
        outcome: what came of its part.
        peak_bytes: its peaks, by level.
    """

    rank: int
    outcome: Outcome
    peak_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step that was run; all bytes are of the fullest GPU.

    Attributes:
        case: the whole spec, as `src.measure.worker` takes it.
        outcome: what came of it.
        source: where the row comes from.
        comm: who carried the collectives: `none` on one GPU, `nccl`, `fake` where nothing was sent.
        peak_bytes: level -> peak of the second step; a level that was not seen is left out. After
            an `oom` a measurement's are what was reached, a simulation's `allocated` what it needs.
        peak_instant: the instant of the allocated peak.
        instants: instant -> level -> peak within it.
        ledger: instant -> owner -> bytes, level allocated; empty for what was not simulated.
        numbers: everything else that was counted or timed, none of it negative: `step_seconds`,
            `after_step_bytes`, `num_alloc_retries`, `num_ooms`, `context_bytes`, ...
        oom_instant: the instant in which memory ran out.
        message: CUDA's out-of-memory message, or how the process died.
        fullest_rank: the rank that the row's bytes are of.
        ranks: every rank, where there were several.
        environment: GPU, driver, CUDA, allocator options, ...
        versions: library -> version.
        notes: what was taken for granted.
        provenance: how the row came to be.
    """

    case: Mapping[str, Any]
    outcome: Outcome
    source: Source
    provenance: Provenance
    comm: str = "none"
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_instant: str | None = None
    instants: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    oom_instant: str | None = None
    message: str | None = None
    fullest_rank: int = 0
    ranks: tuple[Rank, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_simulated = self.case.get("device", _SIMULATED) == _SIMULATED
        if (self.source is Source.MEASURED and is_simulated) or (
            self.source is Source.SIMULATED and not is_simulated
        ):
            allowed = f"no row of device={self.case.get('device', _SIMULATED)}"
            raise UserError(key="source", value=self.source, allowed=allowed)
        if self.source is Source.PUBLISHED and not self.provenance.url:
            raise UserError(key="source", value=self.source, allowed="needs provenance.url")

    @property
    def case_id(self) -> str:
        """Names the case, wherever and whenever it is run."""
        return case_id_of(self.case)

    @property
    def row_id(self) -> str:
        """Names this row: a hash of all that it says."""
        return _hash(self._content())

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values, with both of its ids."""
        return {
            "schema_version": SCHEMA_VERSION,
            "row_id": self.row_id,
            "case_id": self.case_id,
            **self._content(),
        }

    def _content(self) -> dict[str, Any]:
        # A mapping in a slot may be read-only, which asdict cannot copy.
        plain = {name: _plain(getattr(self, name)) for name in self.__slots__}
        plain["provenance"] = asdict(self.provenance)
        plain["ranks"] = [
            {"rank": rank.rank, "outcome": rank.outcome, "peak_bytes": dict(rank.peak_bytes)}
            for rank in self.ranks
        ]
        return plain

    @classmethod
    def from_json(cls, raw: object) -> Self:
        """The row that `to_json` wrote.

        Raises:
            UserError: naming the row: another schema version, a key too many or too few, a value
                of another type, a negative number or one that is none, or ids that do not belong
                to what the row says.
        """
        read = Reader.of_row(raw, schema_version=SCHEMA_VERSION)
        provenance = read.part("provenance")
        ranks = [
            Rank(
                rank=rank.whole("rank"),
                outcome=rank.choice(Outcome, "outcome"),
                peak_bytes=rank.bytes_by("peak_bytes", LEVELS),
            )
            for rank in read.parts("ranks")
        ]
        row = cls(
            case=read.mapping("case"),
            outcome=read.choice(Outcome, "outcome"),
            source=read.choice(Source, "source"),
            provenance=Provenance(
                campaign=provenance.text("campaign"),
                started=provenance.time("started"),
                duration_s=provenance.number("duration_s"),
                git_commit=provenance.text_or_none("git_commit"),
                url=provenance.text_or_none("url"),
            ),
            comm=read.text("comm"),
            peak_bytes=read.bytes_by("peak_bytes", LEVELS),
            peak_instant=read.text_or_none("peak_instant"),
            instants=read.table("instants", LEVELS),
            ledger=read.table("ledger"),
            numbers=read.numbers("numbers"),
            oom_instant=read.text_or_none("oom_instant"),
            message=read.text_or_none("message"),
            fullest_rank=read.whole("fullest_rank"),
            ranks=tuple(ranks),
            environment=read.mapping("environment"),
            versions=read.texts("versions"),
            notes=tuple(read.words("notes")),
        )
        read.same("case_id", row.case_id)
        read.same("row_id", row.row_id)
        for part in (read, provenance):
            part.nothing_else()
        return row


def canonical(value: Any) -> str:
    """`value` as JSON in one spelling: keys sorted, no spaces.

    Raises:
        ValueError: it holds a number that is none (NaN, infinity).
        TypeError: it is not made of JSON values.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def case_id_of(case: Mapping[str, Any]) -> str:
    """A stable name of a case: a hash of its canonical JSON, whatever the order of its keys."""
    return _hash(_plain(case))


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:_ID_LENGTH]


def _plain(value: Any) -> Any:
    """Mappings as dicts and tuples as lists, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, StrEnum):
        return value.value
    return value
