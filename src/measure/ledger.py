"""From a trace to peaks: live bytes by owner, swept over the events of the second step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from src.measure.events import Event, Instant, Owner
from src.measure.result import DryRunResult
from src.measure.trace import Block, Entry
from src.units import ALLOCATION_GRANULARITY_BYTES


def rounded(num_bytes: int) -> int:
    """Bytes of the block that the caching allocator hands out for a request."""
    unit = ALLOCATION_GRANULARITY_BYTES
    return -(-num_bytes // unit) * unit


def final_owner(block: Block) -> Owner:
    """The block's owner, once the whole trace is known."""
    if block.owner is Owner.TEMPORARIES and block.in_forward and block.outlived:
        return Owner.SAVED_ACTIVATIONS
    return block.owner


def events(entries: Sequence[Entry]) -> tuple[Event, ...]:
    """The trace as plain events; a block that was resized becomes several blocks."""
    numbers: dict[int, int] = {}
    out: list[Event] = []
    count = 0
    for entry in entries:
        key = id(entry.block)
        if entry.num_bytes > 0:
            count += 1
            numbers[key] = count
        out.append(
            Event(
                block=numbers[key],
                num_bytes=max(entry.num_bytes, 0),
                stream=entry.block.stream,
                instant=entry.instant,
                owner=final_owner(entry.block),
                step=entry.step,
                used_by=() if entry.num_bytes > 0 else tuple(sorted(entry.block.used_by)),
            )
        )
    return tuple(out)


def summarize(
    entries: Sequence[Entry], *, step: int, versions: Mapping[str, str], notes: tuple[str, ...]
) -> DryRunResult:
    """Peaks and ledger of optimizer step number `step` (and of loading)."""
    live: Counter[Owner] = Counter()
    total = 0
    peaks: dict[Instant, int] = {}
    ledger: dict[Instant, dict[Owner, int]] = {}
    current: tuple[int, Instant] | None = None
    for entry in entries:
        if entry.step not in (0, step):
            _apply(live, entry)
            total = sum(live.values())
            continue
        if current != (entry.step, entry.instant):
            current = (entry.step, entry.instant)
            if total > peaks.get(entry.instant, -1):
                peaks[entry.instant] = total
                ledger[entry.instant] = dict(live)
        total += _apply(live, entry)
        if total > peaks.get(entry.instant, -1):
            peaks[entry.instant] = total
            ledger[entry.instant] = dict(live)
    step_peaks = {key: value for key, value in peaks.items() if key is not Instant.LOAD}
    peak_instant = max(step_peaks, key=lambda key: step_peaks[key])
    order = [instant for instant in Instant if instant in peaks]
    return DryRunResult(
        peak_bytes=step_peaks[peak_instant],
        peak_instant=peak_instant,
        instant_peaks={instant: peaks[instant] for instant in order},
        ledger={
            instant: {
                owner: ledger[instant][owner] for owner in Owner if ledger[instant].get(owner)
            }
            for instant in order
        },
        after_step_bytes=total,
        num_events=len(entries),
        versions=versions,
        notes=notes,
        events=events(entries),
    )


def _apply(live: Counter[Owner], entry: Entry) -> int:
    change = rounded(abs(entry.num_bytes)) * (1 if entry.num_bytes > 0 else -1)
    live[final_owner(entry.block)] += change
    return change
