"""Blocks that another stream still uses when they are freed, and when the host learns it is done.

`record_stream` keeps a freed block from being used again until the other stream's work is done. How
far the GPU has got is a matter of time; what is sure is what the host waits for. FSDP1 waits,
before a unit is gathered, for the free of the unit two gathers ago (`_FreeEventQueue` of
torch/distributed/fsdp/_limiter_utils.py: `limit_all_gathers`, two in flight), and the loop for
everything at the end of a step. Between these the GPU is taken to be as late as it may be.
"""

from __future__ import annotations

from collections import deque

from src.measure.allocator import CachingAllocator
from src.measure.events import Event, Owner

MOST_IN_FLIGHT = 2
"""`_FreeEventQueue._max_num_inflight_all_gathers`."""


class StreamUse:
    """Allocates and frees a trace's blocks, with the uses by other streams.

    Args:
        allocator: the simulated allocator.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._addresses: dict[int, int] = {}
        self._gathered: set[int] = set()
        self._streams: set[int] = {0}
        self._freed: deque[dict[int, int]] = deque()
        self._step = 0

    def apply(self, event: Event) -> None:
        """One event of the trace.

        Raises:
            SimulatedOomError: the block does not fit.
        """
        if event.step != self._step:
            self._step = event.step
            self._allocator.synchronize()
            self._freed.clear()
        if event.num_bytes:
            self._malloc(event)
        else:
            self._free(event)

    def _malloc(self, event: Event) -> None:
        self._streams.add(event.stream)
        is_gathered = event.owner is Owner.GATHERED_WEIGHTS and event.stream != 0
        if is_gathered:
            self._gathered.add(event.block)
            if len(self._freed) >= MOST_IN_FLIGHT:
                for stream, mark in self._freed.popleft().items():
                    self._allocator.synchronize(stream=stream, until=mark)
        self._addresses[event.block] = self._allocator.malloc(event.num_bytes, stream=event.stream)

    def _free(self, event: Event) -> None:
        address = self._addresses.pop(event.block)
        for stream in event.used_by:
            self._allocator.record_stream(address, stream=stream)
        self._allocator.free(address)
        if event.used_by and event.block in self._gathered:
            self._gathered.discard(event.block)
            marks = {stream: self._allocator.mark(stream=stream) for stream in self._streams}
            self._freed.append(marks)
