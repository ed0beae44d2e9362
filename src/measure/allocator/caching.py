"""A simulation of PyTorch's CUDA caching allocator.

It follows `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.11 to 2.13 rule by rule; each method
names the function that it mirrors. Not simulated: CUDA graphs, private pools, several devices.
"""

from __future__ import annotations

from src.measure.allocator.backing import Backing, Observer
from src.measure.allocator.blocks import Block, BlockPool, FreeList
from src.measure.allocator.config import SMALL_SIZE_BYTES, AllocatorConfig
from src.measure.allocator.events import (
    AllocatorEvent,
    BlockState,
    BlockStatus,
    OomReport,
    SegmentState,
    SimulatedOomError,
    Statistics,
    TraceAction,
)
from src.measure.allocator.streams import StreamEvents
from src.units import ALLOCATION_GRANULARITY_BYTES


class CachingAllocator:
    """The allocator of one GPU in one process.

    Streams are numbers; 0 is the default stream. A block belongs to the stream it was allocated on
    and is only reused there. Where other streams use it (`record_stream`), its free takes effect
    when the work those streams had queued by then is done. The simulation does not know when the
    GPU gets that far: **no event is complete until `synchronize` says so** (or the device is full:
    then the allocator itself waits for all, as PyTorch does). A GPU that keeps pace with the CPU is
    `synchronize()` after every free; one that lags is a `synchronize` where the CPU waits.

    Attributes:
        statistics: the figures of `torch.cuda.memory_stats`.
    """

    def __init__(
        self,
        *,
        config: AllocatorConfig | None = None,
        capacity_bytes: int | None = None,
        outside_bytes: int = 0,
        observer: Observer | None = None,
    ) -> None:
        """Start empty.

        Args:
            config: options; None is PyTorch's defaults.
            capacity_bytes: total memory of the device as CUDA reports it; None is unlimited.
            outside_bytes: what the context, NCCL and other processes hold of it.
            observer: called with every event of the trace, in PyTorch's order.
        """
        assert outside_bytes >= 0
        self.statistics = Statistics()
        self._observer = observer
        self._small = BlockPool(is_small=True)
        self._large = BlockPool(is_small=False)
        self._active: dict[int, Block] = {}
        self._events = StreamEvents()
        self._backing = Backing(
            config=config or AllocatorConfig(),
            capacity_bytes=capacity_bytes,
            outside_bytes=outside_bytes,
            statistics=self.statistics,
            observer=observer,
        )
        self._apply_config()

    @property
    def config(self) -> AllocatorConfig:
        """The options in force."""
        return self._backing.config

    def reconfigure(self, config: AllocatorConfig) -> None:
        """Change the options for all that follows (`_set_allocator_settings`)."""
        self._backing.config = config
        self._apply_config()

    def _apply_config(self) -> None:
        config = self._backing.config
        self._expandable = config.expandable_segments
        self._max_split = config.max_split_size_bytes
        rounding = config.max_non_split_rounding_bytes
        self._rounding = config.large_segment_bytes if rounding is None else rounding
        self._collects_garbage = (
            config.garbage_collection_threshold > 0 and self._backing.allowed_bytes is not None
        )

    @property
    def outside_bytes(self) -> int:
        """Device memory that is not the allocator's; may be set while it runs."""
        return self._backing.outside_bytes

    @outside_bytes.setter
    def outside_bytes(self, num_bytes: int) -> None:
        self._backing.outside_bytes = num_bytes

    @property
    def free_bytes(self) -> int | None:
        """What the device has left (cudaMemGetInfo); None without a capacity."""
        return self._backing.free_bytes

    def malloc(self, num_bytes: int, *, stream: int = 0) -> int:
        """Allocate and return the address (`malloc`).

        Args:
            num_bytes: bytes asked for, 1 or more: PyTorch does not call the allocator for none.
            stream: the stream that is current.

        Raises:
            SimulatedOomError: neither the cache nor the device has room, even after all cached
                memory was given back.
        """
        assert num_bytes > 0
        if self._events.any_completed:
            self.process_events()
        size = self._backing.config.block_bytes(num_bytes)
        pool = self._small if size <= SMALL_SIZE_BYTES else self._large
        home = pool.of_stream(stream)
        block = self._find_free(home, size)
        if block is None:
            block = self._reserve(home, size, num_bytes)
        if self._should_split(block, size):
            rest = block
            block = rest.split_front(size)
            home.insert(rest)
        block.allocated = True
        block.requested_bytes = num_bytes
        self._active[block.address] = block
        statistics = self.statistics
        statistics.allocated_bytes.add(block.size)
        statistics.active_bytes.add(block.size)
        statistics.requested_bytes.add(num_bytes)
        self._emit(TraceAction.ALLOC, block.address, num_bytes, stream)
        return block.address

    def free(self, address: int) -> None:
        """Free an allocated block (`free`); with uses on other streams it stays active for now."""
        block = self._active[address]
        assert block.allocated, f"{address:#x} was freed before"
        block.allocated = False
        self.statistics.allocated_bytes.add(-block.size)
        self._emit(TraceAction.FREE_REQUESTED, address, block.requested_bytes, block.home.stream)
        if block.stream_uses:
            self._events.insert(block)
        else:
            self._free_block(block)

    def record_stream(self, address: int, *, stream: int) -> None:
        """Note that another stream uses a block (`recordStream`); its own stream is ignored."""
        block = self._active[address]
        assert block.allocated, f"{address:#x} was freed before"
        if stream != block.home.stream:
            if block.stream_uses is None:
                block.stream_uses = set()
            block.stream_uses.add(stream)

    def block_bytes(self, address: int) -> int:
        """Size of an allocated block, as it counts in `allocated_bytes`."""
        return self._active[address].size

    def mark(self, *, stream: int) -> int:
        """The point that a stream's queue has reached, for `synchronize(until=...)`."""
        return self._events.mark(stream)

    def synchronize(self, *, stream: int | None = None, until: int | None = None) -> None:
        """The GPU has done what was queued: on one stream (up to a `mark`), or on all.

        Blocks that waited for it are free at the next `malloc`, `empty_cache` or `process_events`,
        as in PyTorch, where a CUDA synchronization tells the allocator nothing either.
        """
        self._events.complete(stream=stream, until=until)

    def process_events(self) -> None:
        """Free the blocks whose events are all complete (`process_events`)."""
        for block in self._events.process():
            self._free_block(block)

    def empty_cache(self) -> None:
        """Wait for all streams and give back what is cached whole (`release_cached_blocks`)."""
        self.synchronize()
        self.process_events()
        self._backing.release_all(self._large)
        self._backing.release_all(self._small)

    def reset_peak(self) -> None:
        """Every peak becomes the current value (`torch.cuda.reset_peak_memory_stats`)."""
        self.statistics.reset_peak()

    def segments(self) -> tuple[SegmentState, ...]:
        """All segments and their blocks by address (`snapshot`).

        An expandable segment counts as one segment for each contiguous mapped range.
        """
        cached = [
            block
            for pool in (self._small, self._large)
            for home in pool.lists.values()
            for block in home.by_address.values()
        ]
        heads = [
            block
            for block in (*cached, *self._active.values())
            if block.prev is None or not block.prev.mapped
        ]
        return tuple(_segment_state(head) for head in sorted(heads, key=lambda b: b.address))

    def _find_free(self, home: FreeList, size: int) -> Block | None:
        """Take the best fit out of the cached blocks; None if there is none (`get_free_block`).

        A request below `max_split_size` gets no oversize block, a larger one none that exceeds it
        by the rounding limit. With expandable segments the block that could grow least comes first.
        """
        if self._collects_garbage:
            home.pool.num_searches += 1
        index = home.at_least(size)
        if index == len(home.keys):
            return None
        block = home.at(index)
        if block.segment is not None:
            choose = self._least_expandable if self._expandable else self._first_plain
            chosen = choose(home, index)
            if chosen is None:
                return None
            block = chosen
        if self._max_split is not None:
            if size < self._max_split <= block.size:
                return None
            if size >= self._max_split and block.size >= size + self._rounding:
                return None
        home.remove(block)
        return block

    @staticmethod
    def _least_expandable(home: FreeList, index: int) -> Block:
        """From `index` on, go to larger blocks while they can grow to less than the one before."""
        block = home.at(index)
        for following in range(index + 1, len(home.keys)):
            larger = home.at(following)
            if block.segment is None or _grown(larger) >= _grown(block):
                break
            block = larger
        return block

    @staticmethod
    def _first_plain(home: FreeList, index: int) -> Block | None:
        """The next block that is not of an expandable segment, once those are switched off."""
        for following in range(index + 1, len(home.keys)):
            if home.at(following).segment is None:
                return home.at(following)
        return None

    def _reserve(self, home: FreeList, size: int, num_bytes: int) -> Block:
        """New memory for a block; gives back cached memory where it must (rest of `malloc`)."""
        backing = self._backing
        if self._collects_garbage:
            backing.collect_garbage(self._large)
        block = backing.reserve(home, block_bytes=size)
        if block is None and backing.release_oversize(home, block_bytes=size):
            block = backing.reserve(home, block_bytes=size)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = backing.reserve(home, block_bytes=size)
        if block is None:
            raise self._out_of_memory(home.stream, size, num_bytes)
        return block

    def _out_of_memory(self, stream: int, size: int, num_bytes: int) -> SimulatedOomError:
        backing = self._backing
        free = backing.free_bytes
        assert free is not None
        assert backing.capacity_bytes is not None
        self.statistics.num_ooms += 1
        self._emit(TraceAction.OOM, free, size, stream)
        reserved = self.statistics.reserved_bytes.current
        return SimulatedOomError(
            OomReport(
                requested_bytes=num_bytes,
                tried_bytes=backing.config.segment_bytes(size),
                capacity_bytes=backing.capacity_bytes,
                free_bytes=free,
                process_bytes=backing.outside_bytes + reserved,
                allowed_bytes=backing.allowed_bytes,
                allocated_bytes=self.statistics.allocated_bytes.current,
                reserved_bytes=reserved,
            )
        )

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether the rest of a block is worth keeping apart (`should_split`).

        In the small pool and with expandable segments a rest of 512 B is; in the large pool it has
        to exceed 1 MiB, and requests of `max_split_size` or more leave the block whole.
        """
        rest = block.size - size
        if block.home.pool.is_small or self._expandable:
            return rest >= ALLOCATION_GRANULARITY_BYTES
        return rest > SMALL_SIZE_BYTES and (self._max_split is None or size < self._max_split)

    def _free_block(self, block: Block) -> None:
        """Return a block to its list, merged with free neighbours (`free_block`)."""
        stream = block.home.stream
        self._emit(TraceAction.FREE_COMPLETED, block.address, block.requested_bytes, stream)
        del self._active[block.address]
        self.statistics.active_bytes.add(-block.size)
        self.statistics.requested_bytes.add(-block.requested_bytes)
        block.requested_bytes = 0
        block.absorb(block.prev)
        block.absorb(block.next)
        block.home.insert(block)

    def _emit(self, action: TraceAction, address: int, size: int, stream: int) -> None:
        if self._observer is not None:
            self._observer(AllocatorEvent(action, address, size, stream))


def _grown(block: Block) -> int:
    """The size a block of an expandable segment can grow to (`expandable_size`)."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _segment_state(head: Block) -> SegmentState:
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        status = BlockStatus.INACTIVE if block.free else BlockStatus.PENDING_FREE
        blocks.append(
            BlockState(
                address=block.address,
                size=block.size,
                requested_bytes=block.requested_bytes,
                status=BlockStatus.ALLOCATED if block.allocated else status,
            )
        )
        block = block.next
    return SegmentState(
        address=head.address,
        size=sum(block.size for block in blocks),
        stream=head.home.stream,
        is_small=head.home.pool.is_small,
        is_expandable=head.segment is not None,
        blocks=tuple(blocks),
    )
