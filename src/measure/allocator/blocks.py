"""Blocks of a segment, and the ordered lists of those that are free."""

from __future__ import annotations

from bisect import bisect_left, insort


class ExpandableSegment:
    """A range of virtual addresses that is backed page by page.

    Attributes:
        address: first byte.
        size: bytes of address space.
        page_bytes: bytes mapped or unmapped at once.
    """

    __slots__ = ("address", "page_bytes", "size")

    def __init__(self, *, address: int, size: int, page_bytes: int) -> None:
        self.address = address
        self.size = size
        self.page_bytes = page_bytes

    def whole_pages(self, block: Block) -> tuple[int, int]:
        """First byte and end of the pages that lie wholly in a block; empty if first >= end."""
        page = self.page_bytes
        begin = block.address - self.address
        end = begin + block.size
        return self.address - (-begin // page) * page, self.address + end // page * page


class Block:
    """A range of one segment, linked to its neighbours there (`Block`).

    Attributes:
        address: first byte.
        size: bytes.
        requested_bytes: what the caller asked for.
        home: the free list of its pool and stream.
        prev: neighbour before it in the segment.
        next: neighbour after it.
        allocated: handed out.
        free: in one of the lists of `home`; false also while it waits for another stream's work.
        mapped: backed by memory; only parts of an expandable segment may not be.
        segment: the expandable segment it is part of; None after a plain cudaMalloc.
        stream_uses: other streams that use it.
        num_events: events on other streams that have to complete before it is free.
        age_base: the pool's search count when it became free (`gc_count_base`).
    """

    __slots__ = (
        "address",
        "age_base",
        "allocated",
        "free",
        "home",
        "mapped",
        "next",
        "num_events",
        "prev",
        "requested_bytes",
        "segment",
        "size",
        "stream_uses",
    )

    def __init__(
        self, *, address: int, size: int, home: FreeList, segment: ExpandableSegment | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.segment = segment
        self.requested_bytes = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.free = False
        self.mapped = True
        self.stream_uses: set[int] | None = None
        self.num_events = 0
        self.age_base = 0

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with others."""
        return self.prev is not None or self.next is not None

    @property
    def age(self) -> int:
        """Searches of its pool since it became free (`gc_count`)."""
        return self.home.pool.num_searches - self.age_base

    def split_front(self, size: int) -> Block:
        """Cut a new block of `size` bytes off the front; this one keeps the rest."""
        front = Block(address=self.address, size=size, home=self.home, segment=self.segment)
        front.mapped = self.mapped
        front.link(before=self.prev, after=self)
        self.address += size
        self.size -= size
        return front

    def link(self, *, before: Block | None, after: Block | None) -> None:
        """Take the place between two neighbours (`splice`)."""
        self.prev = before
        self.next = after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def absorb(self, other: Block | None) -> None:
        """Merge with a neighbour if that is free and as mapped as this one (`try_merge_blocks`)."""
        if other is None or not other.free or other.mapped is not self.mapped:
            return
        if other.mapped:
            self.home.remove(other)
        else:
            self.home.remove_unmapped(other)
        if other is self.prev:
            self.address = other.address
            self.link(before=other.prev, after=self.next)
        else:
            self.link(before=self.prev, after=other.next)
        self.size += other.size


class FreeList:
    """The free blocks of one pool and one stream.

    PyTorch keeps one ordered set per pool, by stream, size and address; a list per stream is the
    same order, since no rule ever crosses from one stream to the next.

    Attributes:
        stream: the stream.
        pool: the pool it is part of.
        keys: (size, address) of the free blocks, ascending (`BlockComparatorSize`).
        by_address: the free blocks.
        unmapped: unbacked blocks by address.
    """

    __slots__ = ("by_address", "keys", "pool", "stream", "unmapped")

    def __init__(self, *, stream: int, pool: BlockPool) -> None:
        self.stream = stream
        self.pool = pool
        self.keys: list[tuple[int, int]] = []
        self.by_address: dict[int, Block] = {}
        self.unmapped: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add a free block; its age starts here (`insert_into_blocks`)."""
        block.free = True
        block.age_base = self.pool.num_searches
        insort(self.keys, (block.size, block.address))
        self.by_address[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        block.free = False
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.by_address[block.address]

    def insert_unmapped(self, block: Block) -> None:
        """Add an unbacked block."""
        block.free = True
        block.mapped = False
        self.unmapped[block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        """Take an unbacked block out."""
        block.free = False
        del self.unmapped[block.address]

    def unmapped_blocks(self) -> list[Block]:
        """The unbacked blocks, by address (`BlockComparatorAddress`)."""
        return [self.unmapped[address] for address in sorted(self.unmapped)]

    def at_least(self, size: int) -> int:
        """Index in `keys` of the smallest free block of `size` bytes or more."""
        return bisect_left(self.keys, (size, 0))

    def at(self, index: int) -> Block:
        """The free block at an index of `keys`."""
        return self.by_address[self.keys[index][1]]

    def free_blocks(self) -> list[Block]:
        """The free blocks, by size and address."""
        return [self.by_address[address] for _, address in self.keys]


class BlockPool:
    """The small or the large blocks of all streams (`BlockPool`).

    Attributes:
        is_small: blocks of at most 1 MiB.
        num_searches: searches so far, the clock of garbage collection; stands still without it.
        lists: by stream.
    """

    __slots__ = ("is_small", "lists", "num_searches")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.num_searches = 0
        self.lists: dict[int, FreeList] = {}

    def of_stream(self, stream: int) -> FreeList:
        """The list of a stream, made when it is first asked for."""
        found = self.lists.get(stream)
        if found is None:
            found = self.lists[stream] = FreeList(stream=stream, pool=self)
        return found
