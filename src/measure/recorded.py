"""A recorded memory snapshot at its peak: which blocks were alive, and what the allocator held.

The input is what `torch.cuda.memory._snapshot()` returns, as plain dicts and lists, from JSON for
one. Its trace is replayed from what was allocated when it began; without a trace the peak is the
moment of the dump. A block counts with the bytes that were asked for, rounded up to 512; what the
allocator leaves unsplit behind it (at most 1 MiB) is seen only of blocks that are there at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from src.errors import UserError
from src.measure.allocator import BlockStatus, TraceAction
from src.units import ALLOCATION_GRANULARITY_BYTES

_GROWS = (TraceAction.SEGMENT_ALLOC, TraceAction.SEGMENT_MAP)
_SHRINKS = (TraceAction.SEGMENT_FREE, TraceAction.SEGMENT_UNMAP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A block that was alive at the peak.

    Attributes:
        num_bytes: its bytes.
        category: kind of bytes as the recorder named it; empty where it did not.
        frames: the stack that allocated it, innermost first, as `file:function`.
        is_early: whether it was there before the trace began.
    """

    num_bytes: int
    category: str = ""
    frames: tuple[str, ...] = ()
    is_early: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One GPU of a snapshot.

    Attributes:
        device: its number.
        num_devices: GPUs of the snapshot that hold or recorded anything.
        allocated_bytes: most bytes of blocks at a time.
        reserved_bytes: most bytes of segments at a time.
        reserved_at_peak_bytes: bytes of segments when most blocks were alive.
        num_events: entries of the trace; 0: the peak is the moment of the dump.
        num_ooms: requests that failed.
        settings: the allocator's options as they were set.
        blocks: what was alive at the peak; its bytes add up to `allocated_bytes`.
    """

    device: int
    num_devices: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_at_peak_bytes: int
    num_events: int
    num_ooms: int
    settings: str
    blocks: tuple[Held, ...]


def is_snapshot(content: object) -> bool:
    """Whether JSON content has the keys of a snapshot."""
    return isinstance(content, Mapping) and {"segments", "device_traces"} <= content.keys()


def read_recorded(snapshot: Mapping[str, Any], *, device: int | None = None) -> Recorded:
    """One GPU's peak.

    Args:
        snapshot: the dict of `torch.cuda.memory._snapshot()`.
        device: number of the GPU; None: the one with most bytes allocated at its peak.

    Raises:
        UserError: the snapshot is of another form, or has nothing of that GPU.
    """
    try:
        devices = _devices(snapshot)
        wanted = devices if device is None else [device]
        if not devices or not set(wanted) <= set(devices):
            known = ", ".join(map(str, devices)) or "none"
            raise UserError(
                key="snapshot", value=f"GPU {device}", allowed=f"GPUs with bytes: {known}"
            )
        found = [_Trace(snapshot, each).peak(len(devices)) for each in wanted]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            key="snapshot",
            value=f"{type(error).__name__} {error}",
            allowed="not of the form that torch.cuda.memory._snapshot() gives",
        ) from error
    return max(found, key=lambda each: each.allocated_bytes)


def _devices(snapshot: Mapping[str, Any]) -> list[int]:
    held = {int(segment.get("device", 0)) for segment in snapshot["segments"]}
    traced = {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    return sorted(held | traced)


def _rounded(num_bytes: int) -> int:
    unit = ALLOCATION_GRANULARITY_BYTES
    return -(-num_bytes // unit) * unit


def _frames(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{frame.get('filename', '')}:{frame.get('name', '')}" for frame in entry.get("frames", ())
    )


def _held(entry: Mapping[str, Any], num_bytes: int, *, is_early: bool) -> Held:
    return Held(
        num_bytes=num_bytes,
        category=str(entry.get("category") or ""),
        frames=_frames(entry),
        is_early=is_early,
    )


class _Trace:
    """One GPU's trace, and its segments at the end."""

    def __init__(self, snapshot: Mapping[str, Any], device: int) -> None:
        traces: Sequence[Any] = snapshot["device_traces"]
        self._device = device
        self._entries: Sequence[Mapping[str, Any]] = traces[device] if device < len(traces) else ()
        segments = snapshot["segments"]
        self._segments = [one for one in segments if one.get("device", 0) == device]
        settings = snapshot.get("allocator_settings") or {}
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF")
        self._settings = str(text or "")

    def peak(self, num_devices: int) -> Recorded:
        """The moment with most bytes of blocks, and the blocks of that moment."""
        early = self._early()
        allocated = most = sum(held.num_bytes for held in early.values())
        reserved = most_reserved = at_peak = self._reserved_at_start()
        where = -1
        for index, change, growth in self._changes(early):
            allocated += change
            reserved += growth
            most_reserved = max(most_reserved, reserved)
            if allocated > most:
                most, where, at_peak = allocated, index, reserved
        return Recorded(
            device=self._device,
            num_devices=num_devices,
            allocated_bytes=most,
            reserved_bytes=most_reserved,
            reserved_at_peak_bytes=at_peak,
            num_events=sum(entry["action"] != "snapshot" for entry in self._entries),
            num_ooms=sum(entry["action"] == TraceAction.OOM for entry in self._entries),
            settings=self._settings,
            blocks=tuple(self._live(early, where)),
        )

    def _end_blocks(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for segment in self._segments:
            address = int(segment["address"])
            for block in segment["blocks"]:
                if block["state"] == BlockStatus.ALLOCATED:
                    yield address, block
                address += int(block["size"])

    def _early(self) -> dict[int, Held]:
        """What lived before the trace began: freed or there at its end, not allocated in it."""
        found: dict[int, Held] = {}
        allocated: set[int] = set()
        for entry in self._entries:
            if entry["action"] == TraceAction.ALLOC:
                allocated.add(int(entry["addr"]))
            elif entry["action"] == TraceAction.FREE_REQUESTED:
                address = int(entry["addr"])
                if address not in allocated:
                    # The frames are those of the free.
                    found.setdefault(
                        address, Held(num_bytes=_rounded(int(entry["size"])), is_early=True)
                    )
                allocated.discard(address)
        for address, block in self._end_blocks():
            if address not in allocated:
                found.setdefault(address, _held(block, int(block["size"]), is_early=True))
        return found

    def _reserved_at_start(self) -> int:
        total = sum(int(segment["total_size"]) for segment in self._segments)
        return total - sum(_growth(entry) for entry in self._entries)

    def _changes(self, early: Mapping[int, Held]) -> Iterator[tuple[int, int, int]]:
        """(entry, change of allocated bytes, change of reserved bytes)."""
        sizes = {address: held.num_bytes for address, held in early.items()}
        for index, entry in enumerate(self._entries):
            if entry["action"] == TraceAction.ALLOC:
                size = sizes[int(entry["addr"])] = _rounded(int(entry["size"]))
                yield index, size, 0
            elif entry["action"] == TraceAction.FREE_REQUESTED:
                yield index, -sizes.pop(int(entry["addr"]), 0), 0
            else:
                yield index, 0, _growth(entry)

    def _live(self, early: Mapping[int, Held], last: int) -> list[Held]:
        live: dict[int, Held | int] = dict(early)
        for index, entry in enumerate(self._entries[: last + 1]):
            if entry["action"] == TraceAction.ALLOC:
                live[int(entry["addr"])] = index
            elif entry["action"] == TraceAction.FREE_REQUESTED:
                live.pop(int(entry["addr"]), None)
        return [each if isinstance(each, Held) else self._born(each) for each in live.values()]

    def _born(self, index: int) -> Held:
        entry = self._entries[index]
        return _held(entry, _rounded(int(entry["size"])), is_early=False)


def _growth(entry: Mapping[str, Any]) -> int:
    """Bytes by which an entry makes the segments grow."""
    if entry["action"] in _GROWS:
        return int(entry["size"])
    return -int(entry["size"]) if entry["action"] in _SHRINKS else 0
