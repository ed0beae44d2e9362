"""What settings do not explain: parts of the rest, and facts of the run that may be behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from src.measure.recorded import Recorded
from src.plan.gap.result import Cause
from src.record import LENGTHS, LEVELS, VARYING, Outcome, Row, Source
from src.units import Levels, format_gib

_BETWEEN = {
    (None, "allocated"): "tensors",
    (None, "reserved"): "tensors, fragmentation",
    (None, "device"): "tensors, fragmentation, outside",
    ("allocated", "reserved"): "fragmentation",
    ("allocated", "device"): "fragmentation, outside",
    ("reserved", "device"): "outside",
}
"""What lies between a level and the next lower one that was seen too."""

_COUNTS = ("num_other_processes_before", "num_other_processes")


def rest(estimate: Levels, measured: Mapping[str, int | None], *, outside: str = "") -> list[Cause]:
    """The rest by where it lies: between the levels that were measured; the gaps add up.

    Args:
        estimate: of what was measured.
        measured: level -> bytes; None where it was not seen.
        outside: what is known of the bytes outside the allocator.
    """
    seen = {level: size for level in LEVELS if (size := measured.get(level)) is not None}
    causes: list[Cause] = []
    for below, level in zip((None, *seen), seen, strict=False):
        kind = _BETWEEN[below, level]
        held, expected = seen[level], getattr(estimate, level)
        if below is not None:
            held, expected = held - seen[below], expected - getattr(estimate, below)
        name = level if below is None else f"{level} - {below}"
        words = f"{name}: {format_gib(held)}, estimated {format_gib(expected)}"
        words += f" ({outside})" if outside and level == "device" and below else ""
        causes.append(Cause(kind=kind, gap_bytes=held - expected, words=words))
    return causes


def corrected(peak: int, ledger: int) -> Iterator[Cause]:
    """Where the estimate is not its ledger's sum: a correction, or another instant's."""
    if peak != ledger:
        words = f"the estimate is {format_gib(peak)}, the terms told here are {format_gib(ledger)}"
        yield _fact("correction", words)


def outside_words(row: Row) -> str:
    """Context and NCCL, where a row has them."""
    names = {"context_bytes": "context", "communicator_bytes": "NCCL"}
    return ", ".join(
        f"{name} {format_gib(row.numbers[key])}"
        for key, name in names.items()
        if key in row.numbers
    )


def facts(row: Row) -> Iterator[Cause]:
    """What a row says of its run that moves bytes."""
    others = [int(row.numbers[key]) for key in _COUNTS if row.numbers.get(key)]
    if others:
        words = f"{max(others)} other processes were on the GPU: they share its memory"
        yield _fact("foreign processes", words)
    if row.environment.get("device_bytes_method") == "mem_get_info":
        words = "NVML hid processes: the device level is all that was used on the GPU"
        yield _fact("foreign processes", words)
    retries = int(row.numbers.get("num_alloc_retries", 0))
    if retries:
        words = f"the allocator gave its cache back {retries} times: reserved is the card's limit"
        yield _fact("alloc retries", words)
    if row.outcome is Outcome.OOM:
        where = f" at {row.oom_instant}" if row.oom_instant else ""
        yield _fact("out of memory", f"memory ran out{where}: bytes are those up to there")
    if row.environment.get(LENGTHS) == VARYING:
        yield _fact("lengths", "sequences were of any length up to seq_len: bytes may be fewer")
    spread = _spread(row)
    if spread:
        words = f"ranks differ by {format_gib(spread)} at the device level; this is the fullest"
        yield _fact("ranks", words)
    if row.source is Source.SIMULATED:
        yield _fact("source", "the row is a dry run's: nothing of it was measured")
    if row.comm == "fake" and row.source is Source.MEASURED:
        yield _fact("source", "collectives were not sent: no NCCL bytes in the row")


def _spread(row: Row) -> int:
    sizes = [rank.peak_bytes["device"] for rank in row.ranks if "device" in rank.peak_bytes]
    return max(sizes) - min(sizes) if sizes else 0


def facts_of_recording(found: Recorded) -> Iterator[Cause]:
    """What a snapshot says of its run."""
    if not found.num_events:
        words = "no trace was recorded: the peak is the moment of the dump"
        yield _fact("trace", words)
    if found.num_ooms:
        words = f"{found.num_ooms} requests failed: bytes are those up to there"
        yield _fact("out of memory", words)
    if found.num_devices > 1:
        words = f"{found.num_devices} GPUs are in the snapshot; this is GPU {found.device}"
        yield _fact("ranks", words)
    if found.settings:
        yield _fact("allocator", f"its options were {found.settings}")
    yield _fact("device", "a snapshot does not see context, NCCL and other processes")


def _fact(kind: str, words: str) -> Cause:
    return Cause(kind=kind, gap_bytes=None, words=words)
