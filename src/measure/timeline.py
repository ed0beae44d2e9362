"""A dry run over time: live bytes by owner for a picture, and a snapshot for PyTorch's viewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.measure.allocator import CachingAllocator, SimulatedOomError
from src.measure.events import Event, Instant, Owner
from src.measure.snapshot import TraceRecorder, write_snapshot
from src.measure.stream_use import StreamUse
from src.units import ALLOCATION_GRANULARITY_BYTES

MOST_MOMENTS = 1500
"""Moments that a timeline keeps about; a picture shows no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Live bytes after one event.

    Attributes:
        index: allocations and frees of the step so far.
        instant: window of the step.
        num_bytes: bytes by owner, level `allocated`, in the timeline's order of owners.
    """

    index: int
    instant: Instant
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Live bytes over one step.

    Attributes:
        owners: whose bytes.
        moments: in order; of events close together only the one with most live bytes is kept, so
            that no peak is lost.
    """

    owners: tuple[Owner, ...]
    moments: tuple[Moment, ...]

    def to_json(self) -> dict[str, Any]:
        """The timeline as plain JSON values."""
        return {
            "owners": [owner.value for owner in self.owners],
            "moments": [[m.index, m.instant.value, list(m.num_bytes)] for m in self.moments],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Timeline:
        """The timeline that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: `raw` is of another form.
        """
        return cls(
            owners=tuple(Owner(owner) for owner in raw["owners"]),
            moments=tuple(
                Moment(index=int(index), instant=Instant(instant), num_bytes=tuple(num_bytes))
                for index, instant, num_bytes in raw["moments"]
            ),
        )


def timeline(events: Sequence[Event], *, step: int) -> Timeline:
    """Live bytes by owner over optimizer step number `step`, in blocks of 512 B."""
    live: Counter[Owner] = Counter()
    blocks: dict[int, tuple[Owner, int]] = {}
    per_bin = max(1, sum(event.step == step for event in events) // MOST_MOMENTS)
    found: dict[tuple[int, int], tuple[int, int, Instant, dict[Owner, int]]] = {}
    index = window = total = 0
    previous: Instant | None = None
    for event in events:
        total += _apply(event, live, blocks)
        if event.step != step:
            continue
        if event.instant is not previous:
            previous, window = event.instant, window + 1
        place = (window, index // per_bin)
        if place not in found or found[place][0] < total:
            found[place] = (total, index, event.instant, dict(live))
        index += 1
    present = {owner for *_, cells in found.values() for owner, size in cells.items() if size}
    owners = tuple(owner for owner in Owner if owner in present)
    return Timeline(
        owners=owners,
        moments=tuple(
            Moment(index=at, instant=when, num_bytes=tuple(cells.get(o, 0) for o in owners))
            for _, at, when, cells in found.values()
        ),
    )


def _apply(event: Event, live: Counter[Owner], blocks: dict[int, tuple[Owner, int]]) -> int:
    """Count one event; the change in bytes."""
    if event.num_bytes:
        unit = ALLOCATION_GRANULARITY_BYTES
        size = -(-event.num_bytes // unit) * unit
        blocks[event.block] = (event.owner, size)
        live[event.owner] += size
        return size
    owner, size = blocks.pop(event.block)
    live[owner] -= size
    return -size


def write_trace(
    path: Path, events: Sequence[Event], *, capacity_bytes: int, outside_bytes: int
) -> None:
    """Write a snapshot of all steps that PyTorch's memory viewer opens; all of it, or nothing.

    Every block says its owner, and the instant and step in which it was allocated. A block that
    does not fit on the GPU ends the snapshot.

    Args:
        path: the file, replaced if it exists.
        events: a dry run's events.
        capacity_bytes: usable bytes of the GPU.
        outside_bytes: CUDA context and NCCL.

    Raises:
        UserError: the folder does not exist or the file cannot be written.
    """
    recorder = TraceRecorder()
    allocator = CachingAllocator(
        capacity_bytes=capacity_bytes, outside_bytes=outside_bytes, observer=recorder
    )
    replay = StreamUse(allocator)
    for event in events:
        recorder.owner = event.owner.value
        recorder.label = f"{event.instant.value}, step {event.step}"
        try:
            replay.apply(event)
        except SimulatedOomError:
            break
    write_snapshot(path, events=recorder.events, segments=allocator.segments())
