"""Where the allocator's memory comes from and goes to: cudaMalloc, cudaFree and mapped pages."""

from __future__ import annotations

from collections.abc import Callable

from src.measure.allocator.blocks import Block, BlockPool, ExpandableSegment, FreeList
from src.measure.allocator.config import SMALL_SEGMENT_BYTES, AllocatorConfig
from src.measure.allocator.events import AllocatorEvent, Statistics, TraceAction

Observer = Callable[[AllocatorEvent], None]

_FIRST_ADDRESS = 0x7F00_0000_0000
_UNLIMITED_BYTES = 1 << 42
"""Stands for the card's memory where no capacity is given, to size virtual segments."""


class Backing:
    """The device's memory as one process sees it.

    Addresses only ever grow: a range that was freed is not used again.

    Attributes:
        config: the allocator's options.
        capacity_bytes: total memory as CUDA reports it; None is unlimited.
        outside_bytes: memory of the device that is not the allocator's (context, NCCL, others).
        statistics: shared with the allocator.
        observer: told of every segment; None for nobody.
    """

    def __init__(
        self,
        *,
        config: AllocatorConfig,
        capacity_bytes: int | None,
        outside_bytes: int,
        statistics: Statistics,
        observer: Observer | None,
    ) -> None:
        self.config = config
        self.capacity_bytes = capacity_bytes
        self.outside_bytes = outside_bytes
        self.statistics = statistics
        self.observer = observer
        self._next_address = _FIRST_ADDRESS

    @property
    def free_bytes(self) -> int | None:
        """What cudaMemGetInfo calls free; None without a capacity."""
        if self.capacity_bytes is None:
            return None
        used = self.outside_bytes + self.statistics.reserved_bytes.current
        return max(0, self.capacity_bytes - used)

    @property
    def allowed_bytes(self) -> int | None:
        """The limit on reserved bytes (`setMemoryFraction`: only below 1); None without one."""
        fraction = self.config.per_process_memory_fraction
        if self.capacity_bytes is None or fraction == 1:
            return None
        return int(fraction * self.capacity_bytes)

    def reserve(self, home: FreeList, *, block_bytes: int) -> Block | None:
        """A new block of at least `block_bytes`, in no list; None if the device is full.

        Mirrors `alloc_block`: the allowance is checked with the size of a plain segment even where
        an expandable one maps less, or up to a page more.
        """
        segment_bytes = self.config.segment_bytes(block_bytes)
        allowed = self.allowed_bytes
        reserved = self.statistics.reserved_bytes.current
        if allowed is not None and reserved + segment_bytes > allowed:
            return None
        if self.config.expandable_segments:
            return self._expand(home, block_bytes=block_bytes)
        if not self._has_room(segment_bytes):
            return None
        block = Block(address=self._take_addresses(segment_bytes), size=segment_bytes, home=home)
        self.statistics.num_segments += 1
        self._count_reserved(TraceAction.SEGMENT_ALLOC, block.address, segment_bytes, home.stream)
        return block

    def release_all(self, pool: BlockPool) -> None:
        """Give back every unsplit free segment and every wholly free page (`release_blocks`)."""
        for home in pool.lists.values():
            blocks = home.free_blocks()
            for block in blocks:
                if block.segment is None and not block.is_split:
                    self._release(block)
            for block in blocks:
                if block.segment is not None:
                    self._unmap(block)

    def release_oversize(self, home: FreeList, *, block_bytes: int) -> bool:
        """Give back oversize blocks, only as many as the request needs; whether that was enough.

        Mirrors `release_available_cached_blocks`: the smallest block that is large enough, or else
        the largest ones until their sum is. Without `max_split_size` no block is oversize.
        """
        oversize = self.config.max_split_size_bytes
        if oversize is None:
            return False
        wanted = max(block_bytes, oversize)
        index = home.at_least(wanted)
        if index < len(home.keys) and home.at(index).segment is None:
            self._release(home.at(index))
            return True
        released = 0
        while released < wanted and index > 0:
            index -= 1
            block = home.at(index)
            if block.size < oversize:
                break
            if block.segment is None:
                released += block.size
                self._release(block)
        return released >= wanted

    def collect_garbage(self, pool: BlockPool) -> None:
        """Give back the older half of the unsplit free blocks, until usage is below the threshold.

        Mirrors `garbage_collect_cached_blocks`: a pass releases every block of at least average age
        and may therefore release more than is needed; `pool` is the large one.
        """
        threshold = int(self.config.garbage_collection_threshold * (self.allowed_bytes or 0))
        excess = self.statistics.reserved_bytes.current - threshold
        if excess <= 0:
            return
        candidates = [
            block
            for home in pool.lists.values()
            for block in home.free_blocks()
            if not block.is_split
        ]
        total_age = sum(block.age for block in candidates)
        count = len(candidates)
        candidates = [block for block in candidates if block.segment is None]
        reclaimed = 0
        while reclaimed < excess and count > 0:
            average_age = total_age / count
            old = [block for block in candidates if block.age >= average_age]
            if not old:
                return
            candidates = [block for block in candidates if block.age < average_age]
            for block in old:
                reclaimed += block.size
                total_age -= block.age
                count -= 1
                self._release(block)

    def _expand(self, home: FreeList, *, block_bytes: int) -> Block | None:
        """Map pages until a free block holds `block_bytes` (`try_allocate_expandable_block`)."""
        block = self._find_expandable(home, block_bytes)
        if not block.mapped and not self._map(block, min(block.size, block_bytes)):
            return None
        while block.size < block_bytes:
            following = block.next
            if following is None or not self._map(
                following, min(following.size, block_bytes - block.size)
            ):
                return None
            block = following
        home.remove(block)
        return block

    def _find_expandable(self, home: FreeList, block_bytes: int) -> Block:
        """The lowest address with room for the block, mapped or not (`find_expandable_block`)."""
        for unmapped in home.unmapped_blocks():
            first = unmapped
            if unmapped.prev is not None and unmapped.prev.free:
                first = unmapped.prev
            if _room(first, block_bytes) >= block_bytes:
                return first
        page = SMALL_SEGMENT_BYTES if home.pool.is_small else self.config.large_segment_bytes
        total = _UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes
        size = -(-(total + total // 8) // page) * page
        segment = ExpandableSegment(address=self._take_addresses(size), size=size, page_bytes=page)
        block = Block(address=segment.address, size=size, home=home, segment=segment)
        home.insert_unmapped(block)
        return block

    def _map(self, block: Block, num_bytes: int) -> bool:
        """Back the front of an unmapped block with whole pages, if there is room (`map_block`)."""
        segment, home = block.segment, block.home
        assert segment is not None
        assert not block.mapped
        mapped_bytes = -(-num_bytes // segment.page_bytes) * segment.page_bytes
        if not self._has_room(mapped_bytes):
            return False
        address = block.address
        home.remove_unmapped(block)
        if mapped_bytes < block.size:
            rest = Block(
                address=address + mapped_bytes,
                size=block.size - mapped_bytes,
                home=home,
                segment=segment,
            )
            rest.link(before=block, after=block.next)
            home.insert_unmapped(rest)
            block.size = mapped_bytes
        block.mapped = True
        block.absorb(block.prev)
        block.absorb(block.next)
        home.insert(block)
        self._count_reserved(TraceAction.SEGMENT_MAP, address, mapped_bytes, home.stream)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block of an expandable segment (`unmap_block`)."""
        segment, home = block.segment, block.home
        assert segment is not None
        begin, end = segment.whole_pages(block)
        if begin >= end:
            return
        home.remove(block)
        if begin > block.address:
            home.insert(block.split_front(begin - block.address))
        if end < block.address + block.size:
            rest = block
            block = rest.split_front(end - begin)
            home.insert(rest)
        block.mapped = False
        block.absorb(block.prev)
        block.absorb(block.next)
        home.insert_unmapped(block)
        if not block.is_split:
            assert block.size == segment.size
            home.remove_unmapped(block)
        self._count_released(TraceAction.SEGMENT_UNMAP, begin, end - begin, home.stream)

    def _release(self, block: Block) -> None:
        """Give a whole segment back to the device (`release_block`)."""
        block.home.remove(block)
        self.statistics.num_segments -= 1
        self._count_released(TraceAction.SEGMENT_FREE, block.address, block.size, block.home.stream)

    def _has_room(self, num_bytes: int) -> bool:
        free = self.free_bytes
        return free is None or num_bytes <= free

    def _take_addresses(self, num_bytes: int) -> int:
        """A range of addresses that nothing has used before."""
        address = self._next_address
        self._next_address = address + num_bytes
        return address

    def _count_reserved(self, action: TraceAction, address: int, size: int, stream: int) -> None:
        self.statistics.num_device_allocs += 1
        self.statistics.reserved_bytes.add(size)
        if self.observer is not None:
            self.observer(AllocatorEvent(action, address, size, stream))

    def _count_released(self, action: TraceAction, address: int, size: int, stream: int) -> None:
        self.statistics.num_device_frees += 1
        self.statistics.reserved_bytes.add(-size)
        if self.observer is not None:
            self.observer(AllocatorEvent(action, address, size, stream))


def _room(block: Block, enough: int) -> int:
    """Bytes of free address space from `block` on, counted until `enough`."""
    total = 0
    following: Block | None = block
    while following is not None and following.free and total < enough:
        total += following.size
        following = following.next
    return total
