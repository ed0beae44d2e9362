"""Freed blocks that wait for work which other streams had queued."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from src.measure.allocator.blocks import Block


class _Queue:
    """Events recorded on one stream, in order; each holds a block back."""

    __slots__ = ("blocks", "num_completed", "num_processed", "num_recorded")

    def __init__(self) -> None:
        self.blocks: deque[Block] = deque()
        self.num_recorded = 0
        self.num_completed = 0
        self.num_processed = 0


class StreamEvents:
    """The events of all streams (`cuda_events`), and how far the GPU has come on each.

    Attributes:
        any_completed: some events are complete and not yet processed.
    """

    __slots__ = ("_queues", "any_completed")

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self.any_completed = False

    def insert(self, block: Block) -> None:
        """Record an event on each stream that uses a freed block (`insert_events`)."""
        for stream in sorted(block.stream_uses or ()):
            queue = self._queues.setdefault(stream, _Queue())
            queue.num_recorded += 1
            queue.blocks.append(block)
            block.num_events += 1
        block.stream_uses = None

    def mark(self, stream: int) -> int:
        """How many events were recorded on a stream so far."""
        queue = self._queues.get(stream)
        return 0 if queue is None else queue.num_recorded

    def complete(self, *, stream: int | None, until: int | None) -> None:
        """The GPU has passed the events of one stream, or of all; up to a mark, or to the last."""
        for of_stream, queue in self._queues.items():
            if stream is None or of_stream == stream:
                done = queue.num_recorded if until is None else min(until, queue.num_recorded)
                queue.num_completed = max(queue.num_completed, done)
                self.any_completed |= queue.num_processed < queue.num_completed

    def process(self) -> Iterator[Block]:
        """Drop the complete events; the blocks that wait for nothing more (`process_events`)."""
        self.any_completed = False
        for queue in self._queues.values():
            while queue.num_processed < queue.num_completed:
                queue.num_processed += 1
                block = queue.blocks.popleft()
                block.num_events -= 1
                if block.num_events == 0:
                    yield block
