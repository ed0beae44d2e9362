"""A recorded memory snapshot replayed through the simulated allocator.

The input is what `torch.cuda.memory._snapshot()` returns, as plain dicts and lists, from JSON for
one. Snapshot files are pickles; this module reads none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from src.errors import UserError
from src.measure.allocator.caching import CachingAllocator
from src.measure.allocator.config import AllocatorConfig
from src.measure.allocator.events import (
    BlockStatus,
    SimulatedOomError,
    Statistics,
    TraceAction,
)

_GROWS = (TraceAction.SEGMENT_ALLOC, TraceAction.SEGMENT_MAP)
_SHRINKS = (TraceAction.SEGMENT_FREE, TraceAction.SEGMENT_UNMAP)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """Reserved bytes, simulated against recorded.

    Attributes:
        num_events: entries of the trace.
        num_preloaded: blocks that lived before the trace began; where they lay is a guess.
        recorded_peak_bytes: highest recorded sum of the segments.
        simulated_peak_bytes: highest simulated one.
        recorded_end_bytes: recorded sum at the end.
        simulated_end_bytes: simulated one.
        largest_gap_bytes: simulated less recorded, where they differ most.
        largest_gap_event: index of the entry after which that is so.
        num_recorded_ooms: requests that failed in the recording.
        num_simulated_ooms: requests that failed in the simulation.
        statistics: of the simulated allocator at the end.
    """

    num_events: int
    num_preloaded: int
    recorded_peak_bytes: int
    simulated_peak_bytes: int
    recorded_end_bytes: int
    simulated_end_bytes: int
    largest_gap_bytes: int
    largest_gap_event: int
    num_recorded_ooms: int
    num_simulated_ooms: int
    statistics: Statistics

    @property
    def peak_ratio(self) -> float:
        """Simulated over recorded peak; 1 where nothing was ever reserved."""
        if self.recorded_peak_bytes == 0:
            return 1.0
        return self.simulated_peak_bytes / self.recorded_peak_bytes


def replay_snapshot(
    snapshot: Mapping[str, Any],
    *,
    device: int = 0,
    config: AllocatorConfig | None = None,
    capacity_bytes: int | None = None,
    outside_bytes: int = 0,
) -> ReplayReport:
    """Replay the allocations and frees of one device.

    A free that was delayed in the recording (`record_stream`) is delayed as long here. Memory that
    the recording gave back to the device is given back here by `empty_cache`; with a capacity, what
    was given back to make room for a new segment is left to the simulation. Private pools (CUDA
    graphs) are taken for the default pool.

    Args:
        snapshot: the dict of `torch.cuda.memory._snapshot()`.
        device: index of the GPU.
        config: options; None takes the snapshot's own `allocator_settings`.
        capacity_bytes: total memory of the device; None is unlimited.
        outside_bytes: memory of the device that is not the allocator's.

    Raises:
        UserError: the snapshot lacks a key, or an entry is not of its form.
    """
    chosen = recorded_config(snapshot) if config is None else config
    try:
        recording = _read(snapshot, device)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            key="snapshot",
            value=f"{type(error).__name__} {error}",
            allowed="not of the form that torch.cuda.memory._snapshot() gives",
        ) from error
    allocator = CachingAllocator(
        config=chosen, capacity_bytes=capacity_bytes, outside_bytes=outside_bytes
    )
    return _Replay(allocator, recording, is_limited=capacity_bytes is not None).run()


def recorded_config(snapshot: Mapping[str, Any]) -> AllocatorConfig:
    """The options that a snapshot was recorded under; PyTorch's defaults if it names none.

    Raises:
        UserError: an option that is not simulated.
    """
    settings = snapshot.get("allocator_settings") or {}
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
    return AllocatorConfig.parse(text)


class _Entry(NamedTuple):
    """One entry of the trace; `address` is 0 where it has none."""

    action: str
    address: int
    size: int
    stream: int


class _Recording(NamedTuple):
    """One device's trace, the bytes of its segments at the end, and what is allocated there."""

    trace: Sequence[_Entry]
    end_bytes: int
    end_blocks: Mapping[int, tuple[int, int]]


def _read(snapshot: Mapping[str, Any], device: int) -> _Recording:
    traces = snapshot["device_traces"]
    trace = [
        _Entry(
            str(entry["action"]),
            int(entry.get("addr", 0)),
            int(entry["size"]),
            int(entry.get("stream") or 0),
        )
        for entry in (traces[device] if device < len(traces) else ())
    ]
    end_bytes = 0
    end_blocks = {}
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        end_bytes += int(segment["total_size"])
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == BlockStatus.ALLOCATED:
                size = int(block.get("requested_size") or block["size"])
                end_blocks[address] = (size, int(segment.get("stream") or 0))
            address += int(block["size"])
    return _Recording(trace, end_bytes, end_blocks)


class _Replay:
    """One pass over a trace; addresses of the recording map to simulated ones."""

    def __init__(
        self, allocator: CachingAllocator, recording: _Recording, *, is_limited: bool
    ) -> None:
        self._allocator = allocator
        self._recording = recording
        self._actions = [entry.action for entry in recording.trace]
        self._is_limited = is_limited
        self._addresses: dict[int, int] = {}
        self._delayed: set[int] = set()
        self._num_ooms = 0

    def run(self) -> ReplayReport:
        reserved = self._allocator.statistics.reserved_bytes
        recorded = peak = self._start_bytes()
        num_preloaded = self._preload()
        self._allocator.reset_peak()
        gap, gap_event = 0, 0
        for index, entry in enumerate(self._recording.trace):
            if entry.action in _GROWS:
                recorded += entry.size
                peak = max(peak, recorded)
                continue  # the simulation grows with the allocation that follows
            if entry.action in _SHRINKS:
                recorded -= entry.size
            self._replay(index, entry)
            if self._is_settled(index) and abs(reserved.current - recorded) > abs(gap):
                gap, gap_event = reserved.current - recorded, index
        return ReplayReport(
            num_events=len(self._actions),
            num_preloaded=num_preloaded,
            recorded_peak_bytes=peak,
            simulated_peak_bytes=reserved.peak,
            recorded_end_bytes=recorded,
            simulated_end_bytes=reserved.current,
            largest_gap_bytes=gap,
            largest_gap_event=gap_event,
            num_recorded_ooms=self._actions.count(TraceAction.OOM),
            num_simulated_ooms=self._num_ooms,
            statistics=self._allocator.statistics,
        )

    def _start_bytes(self) -> int:
        """What was reserved when the trace began: what is at its end, less what it changed."""
        total = self._recording.end_bytes
        for entry in self._recording.trace:
            if entry.action in _GROWS:
                total -= entry.size
            elif entry.action in _SHRINKS:
                total += entry.size
        return total

    def _preload(self) -> int:
        """Allocate what lived before the trace began, by address; how many blocks that is.

        That is what is freed, or allocated at the end, without an allocation in the trace.
        """
        found: dict[int, tuple[int, int]] = {}
        allocated: set[int] = set()
        for entry in self._recording.trace:
            if entry.action == TraceAction.ALLOC:
                allocated.add(entry.address)
            elif entry.action in (TraceAction.FREE_REQUESTED, TraceAction.FREE_COMPLETED):
                if entry.address not in allocated:
                    found.setdefault(entry.address, (entry.size, entry.stream))
                if entry.action == TraceAction.FREE_COMPLETED:
                    allocated.discard(entry.address)
        for address, block in self._recording.end_blocks.items():
            if address not in allocated:
                found.setdefault(address, block)
        for address, (size, stream) in sorted(found.items()):
            self._malloc(address, size, stream)
        return len(found)

    def _replay(self, index: int, entry: _Entry) -> None:
        if entry.action == TraceAction.ALLOC:
            self._malloc(entry.address, entry.size, entry.stream)
        elif entry.action == TraceAction.FREE_REQUESTED:
            self._free(entry.address, is_delayed=self._is_delayed(index))
        elif entry.action == TraceAction.FREE_COMPLETED:
            self._complete(entry.address)
        elif entry.action in _SHRINKS:
            is_first = index == 0 or self._actions[index - 1] not in _SHRINKS
            if is_first and not self._is_for_room(index):
                self._allocator.empty_cache()
        elif entry.action == TraceAction.OOM and self._is_limited:
            self._fail(entry.size, entry.stream)

    def _malloc(self, address: int, size: int, stream: int) -> None:
        if size <= 0:
            return
        try:
            self._addresses[address] = self._allocator.malloc(size, stream=stream)
        except SimulatedOomError:
            self._num_ooms += 1

    def _fail(self, size: int, stream: int) -> None:
        """A request that failed in the recording should fail here; if not, it leaves nothing."""
        try:
            self._allocator.free(self._allocator.malloc(size, stream=stream))
        except SimulatedOomError:
            self._num_ooms += 1

    def _free(self, address: int, *, is_delayed: bool) -> None:
        if address not in self._addresses:
            return  # its allocation failed here
        if is_delayed:
            # A stream for each block, so that each is released on its own.
            self._allocator.record_stream(self._addresses[address], stream=-1 - address)
            self._allocator.free(self._addresses[address])
            self._delayed.add(address)
        else:
            self._allocator.free(self._addresses.pop(address))

    def _complete(self, address: int) -> None:
        """A free takes effect; nothing is left to do where it was not delayed."""
        if address not in self._addresses:
            return
        simulated = self._addresses.pop(address)
        if address in self._delayed:
            self._delayed.remove(address)
            self._allocator.synchronize(stream=-1 - address)
            self._allocator.process_events()
        else:
            self._allocator.free(simulated)  # it was requested before the trace began

    def _is_delayed(self, index: int) -> bool:
        """Whether a free did not complete in the same call, which would be the next entry."""
        following = self._recording.trace[index + 1 : index + 2]
        return not any(
            entry.action == TraceAction.FREE_COMPLETED
            and entry.address == self._recording.trace[index].address
            for entry in following
        )

    def _is_for_room(self, index: int) -> bool:
        """Whether memory is given back for a request whose fate the simulation decides itself."""
        if not self._is_limited:
            return False
        for following in range(index, len(self._actions)):
            action = self._actions[following]
            if action not in _SHRINKS:
                return action in _GROWS or action == TraceAction.OOM
        return False

    def _is_settled(self, index: int) -> bool:
        """Whether both should agree here: not within what one request or release does."""
        if index + 1 == len(self._actions):
            return True
        return self._actions[index + 1] not in (*_GROWS, *_SHRINKS, TraceAction.OOM)
