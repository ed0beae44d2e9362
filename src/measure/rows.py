"""From the answers of a case's processes to its row."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.record import Outcome, Provenance, Rank, Row, Source

_GRAVEST_FIRST = (
    Outcome.INVALID,
    Outcome.OOM,
    Outcome.CRASHED,
    Outcome.TIMEOUT,
    Outcome.OK,
)
"""What several ranks came to is the first of these that any of them came to: a rank that ran out of
memory leaves the others waiting."""

_NUMBERS = ("after_step_bytes", "step_seconds", "num_parameters", "num_trainable_parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank's process ended.

    Attributes:
        outcome: what came of it.
        answer: the worker's row; None where it gave none.
        message: what there is to say where it gave none.
    """

    outcome: Outcome
    answer: Mapping[str, Any] | None = None
    message: str | None = None

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Level -> peak, of the levels that were seen."""
        if self.answer is None:
            return {}
        reservation = self.answer.get("reservation") or {}
        found = {
            "allocated": self.answer["peak_bytes"],
            "reserved": reservation.get("reserved_bytes"),
            "device": reservation.get("device_bytes"),
        }
        return {level: size for level, size in found.items() if size is not None}

    @property
    def fullness(self) -> tuple[int, int, int]:
        """What ranks are compared by: the device level, then reserved, then allocated."""
        peaks = self.peak_bytes
        return peaks.get("device", -1), peaks.get("reserved", -1), peaks.get("allocated", -1)


def make_row(case: Mapping[str, Any], ends: Sequence[RankEnd], provenance: Provenance) -> Row:
    """The row of a case from how its ranks ended, one or more; bytes are the fullest rank's.

    Raises:
        KeyError, TypeError, ValueError: an answer is of another form.
    """
    fullest = max(range(len(ends)), key=lambda rank: ends[rank].fullness)
    answer = ends[fullest].answer or {}
    outcome = min((end.outcome for end in ends), key=_GRAVEST_FIRST.index)
    source = Source(case.get("device", Source.SIMULATED).replace("cuda", Source.MEASURED))
    reservation = answer.get("reservation") or {}
    messages = [_message(end) for end in ends if end.outcome is outcome]
    return Row(
        case=case,
        outcome=outcome,
        source=source,
        provenance=provenance,
        comm=answer.get("comm", "none" if num_gpus_of(case) == 1 else "fake"),
        peak_bytes=ends[fullest].peak_bytes,
        peak_instant=answer.get("peak_instant"),
        instants=_instants(answer),
        ledger=answer.get("ledger", {}),
        numbers=_numbers(answer, reservation),
        oom_instant=reservation.get("oom_instant"),
        message=next((message for message in messages if message is not None), None),
        fullest_rank=fullest,
        ranks=_ranks(ends) if len(ends) > 1 else (),
        environment=_environment(answer, reservation),
        versions=answer.get("versions", {}),
        notes=tuple(answer.get("notes", ())),
    )


def num_gpus_of(case: Mapping[str, Any]) -> int:
    """GPUs of a case's layout."""
    layout = case.get("layout", {})
    return int(layout.get("dp", 1)) * int(layout.get("tp", 1))


def _message(end: RankEnd) -> str | None:
    if end.answer is None:
        return end.message
    message = (end.answer.get("reservation") or {}).get("oom_message")
    return None if message is None else str(message)


def _instants(answer: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for level, key in (("allocated", "instant_peaks"), ("reserved", "instant_reserved_peaks")):
        for instant, size in answer.get(key, {}).items():
            found.setdefault(instant, {})[level] = size
    return found


def _numbers(answer: Mapping[str, Any], reservation: Mapping[str, Any]) -> dict[str, float]:
    """Every count, size and time that is not a peak; what is no number of 0 or more is left out."""
    of_message = reservation.get("oom_numbers") or {}
    found = {
        **{key: answer.get(key) for key in _NUMBERS},
        **{key: value for key, value in reservation.items() if not key.startswith("reserved")},
        **{f"oom_{key}": value for key, value in of_message.items()},
    }
    found.pop("device_bytes", None)
    return {key: value for key, value in found.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def _ranks(ends: Sequence[RankEnd]) -> tuple[Rank, ...]:
    return tuple(
        Rank(rank=rank, outcome=end.outcome, peak_bytes=end.peak_bytes)
        for rank, end in enumerate(ends)
    )


def _environment(answer: Mapping[str, Any], reservation: Mapping[str, Any]) -> dict[str, Any]:
    found = {"platform": platform.platform(), "python": platform.python_version()}
    method = reservation.get("device_bytes_method")
    if method is not None:
        found["device_bytes_method"] = method
    return found | dict(answer.get("environment", {}))
