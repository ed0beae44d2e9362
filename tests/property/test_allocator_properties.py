"""What holds for the simulated allocator whatever is asked of it, and its rules written again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from src.measure.allocator import (
    AllocatorConfig,
    BlockStatus,
    CachingAllocator,
    SimulatedOomError,
    Statistics,
)

K = 1024
M = 1024**2

SIZES = st.one_of(
    st.integers(1, 4 * K),
    st.integers(M - 2 * K, M + 2 * K),
    st.sampled_from([M, 2 * M, 3 * M, 5 * M, 9 * M, 10 * M, 20 * M, 21 * M, 40 * M, 64 * M]),
    st.integers(1, 80 * M),
)
CONFIGS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:20",
        "max_split_size_mb:32,max_non_split_rounding_mb:24",
        "max_split_size_mb:20,expandable_segments:True",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8,expandable_segments:True",
        "roundup_power2_divisions:[1:2,64:4,>:8]",
        "large_segment_size_mb:32",
    ]
)
CAPACITIES = st.sampled_from([None, 64 * M, 100 * M, 203 * M, 400 * M])

MALLOC = st.tuples(st.just("malloc"), SIZES, st.sampled_from([0, 0, 0, 5]))
FREE = st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0))
RECORD = st.tuples(st.just("record"), st.integers(0, 10**6), st.sampled_from([0, 5, 6]))
SYNCHRONIZE = st.tuples(st.just("synchronize"), st.just(0), st.sampled_from([0, 5, 6]))
EMPTY = st.tuples(st.just("empty"), st.just(0), st.just(0))
Operations = list[tuple[str, int, int]]
OPERATIONS = st.lists(
    st.one_of(MALLOC, MALLOC, MALLOC, FREE, FREE, RECORD, SYNCHRONIZE, EMPTY),
    min_size=20,
    max_size=100,
)


@dataclass
class Run:
    """An allocator driven by operations; what it has handed out, by address."""

    text: str
    capacity: int | None
    live: dict[int, int] = field(default_factory=dict)
    addresses: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = AllocatorConfig.parse(self.text)
        outside = 0 if self.capacity is None else 7 * M
        if self.capacity is None:
            self.config = AllocatorConfig.parse(self.text.split(",per_process")[0])
        self.allocator = CachingAllocator(
            config=self.config, capacity_bytes=self.capacity, outside_bytes=outside
        )

    def do(self, operation: tuple[str, int, int]) -> None:
        name, number, stream = operation
        chosen = sorted(self.live)[number % len(self.live)] if self.live else None
        if name == "malloc":
            try:
                address = self.allocator.malloc(number, stream=stream)
            except SimulatedOomError:
                self.addresses.append(None)
            else:
                self.live[address] = number
                self.addresses.append(address)
        elif name == "free" and chosen is not None:
            self.allocator.free(chosen)
            del self.live[chosen]
        elif name == "record" and chosen is not None:
            self.allocator.record_stream(chosen, stream=stream)
        elif name == "synchronize":
            self.allocator.synchronize(stream=stream)
        elif name == "empty":
            self.allocator.empty_cache()


def check(run: Run) -> None:
    """The invariants that hold after every operation."""
    statistics = run.allocator.statistics
    segments = run.allocator.segments()
    end = 0
    found: dict[int, int] = {}
    active = 0
    for segment in segments:
        assert segment.address >= end, "segments overlap"
        position = segment.address
        previous = None
        for block in segment.blocks:
            assert block.address == position, "blocks leave no gap and do not overlap"
            assert block.size > 0
            both = {previous, block.status}
            assert both != {BlockStatus.INACTIVE}, "free neighbours are merged"
            previous = block.status
            position += block.size
            if block.status is not BlockStatus.INACTIVE:
                active += block.size
                assert block.size >= run.config.block_bytes(block.requested_bytes)
            if block.status is BlockStatus.ALLOCATED:
                found[block.address] = block.requested_bytes
                assert run.allocator.block_bytes(block.address) == block.size
        end = segment.address + segment.size
        assert position == end, "blocks fill the segment"
    assert found == run.live
    assert statistics.reserved_bytes.current == sum(segment.size for segment in segments)
    assert statistics.active_bytes.current == active
    assert sum(run.live.values()) <= statistics.requested_bytes.current
    for gauge in (statistics.allocated_bytes, statistics.active_bytes, statistics.reserved_bytes):
        assert 0 <= gauge.current <= gauge.peak
    assert statistics.allocated_bytes.current <= active <= statistics.reserved_bytes.current
    if run.capacity is not None:
        assert statistics.reserved_bytes.peak <= run.capacity - 7 * M
        # PyTorch compares the allowance with a plain segment's size; pages may round up beyond it.
        page = run.config.large_segment_bytes if run.config.expandable_segments else 0
        allowed = int(run.config.per_process_memory_fraction * run.capacity)
        assert statistics.reserved_bytes.peak <= allowed + page


@settings(max_examples=100, deadline=None)
@given(text=CONFIGS, capacity=CAPACITIES, operations=OPERATIONS)
def test_segments_are_partitioned_and_sums_agree(
    text: str, capacity: int | None, operations: Operations
) -> None:
    run = Run(text, capacity)
    for operation in operations:
        run.do(operation)
        check(run)


@settings(max_examples=100, deadline=None)
@given(text=CONFIGS, capacity=CAPACITIES, operations=OPERATIONS)
def test_all_is_given_back_in_the_end(
    text: str, capacity: int | None, operations: Operations
) -> None:
    run = Run(text, capacity)
    for operation in operations:
        run.do(operation)
    for address in run.live:
        run.allocator.free(address)
    run.allocator.empty_cache()
    statistics = run.allocator.statistics
    assert run.allocator.segments() == ()
    assert statistics.reserved_bytes.current == statistics.allocated_bytes.current == 0
    assert statistics.active_bytes.current == statistics.requested_bytes.current == 0
    assert statistics.num_segments == 0


@settings(max_examples=50, deadline=None)
@given(text=CONFIGS, capacity=CAPACITIES, operations=OPERATIONS)
def test_two_runs_are_the_same(text: str, capacity: int | None, operations: Operations) -> None:
    runs = [Run(text, capacity), Run(text, capacity)]
    for run in runs:
        for operation in operations:
            run.do(operation)
    outcomes: list[tuple[list[int | None], Statistics]] = [
        (run.addresses, run.allocator.statistics) for run in runs
    ]
    assert outcomes[0] == outcomes[1]


@settings(max_examples=50, deadline=None)
@given(text=CONFIGS, operations=OPERATIONS)
def test_without_a_capacity_nothing_fails(text: str, operations: Operations) -> None:
    run = Run(text, None)
    for operation in operations:
        run.do(operation)
    assert None not in run.addresses
    assert run.allocator.statistics.num_alloc_retries == run.allocator.statistics.num_ooms == 0


@dataclass
class Plain:
    """The same rules written down again as simply as can be, for plain segments on one stream.

    A segment is a list of [size, is_free]; the place of a block is (segment, offset).
    """

    capacity: int
    max_split: int | None
    segments: list[tuple[bool, list[list[int]]]] = field(default_factory=list)
    num_retries: int = 0

    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def malloc(self, num_bytes: int) -> tuple[list[list[int]], int] | None:
        size = max(512, -(-num_bytes // 512) * 512)
        is_small = size <= M
        fits = [
            (blocks[index][0], number, index)
            for number, (small, blocks) in enumerate(self.segments)
            if small == is_small
            for index in range(len(blocks))
            if blocks[index][1] and blocks[index][0] >= size
        ]
        limit = self.max_split
        if fits and limit is not None:
            best = min(fits)[0]
            if size < limit <= best or (size >= limit and best >= size + 20 * M):
                fits = []
        if not fits:
            if not self._grow(size, is_small):
                return None
            fits = [(0, len(self.segments) - 1, 0)]
        _, number, index = min(fits)
        blocks = self.segments[number][1]
        rest = blocks[index][0] - size
        is_worth = rest >= 512 if is_small else rest > M and (limit is None or size < limit)
        if is_worth:
            blocks[index : index + 1] = [[size, 0], [rest, 1]]
        else:
            blocks[index][1] = 0
        return blocks, sum(block[0] for block in blocks[:index])

    def free(self, place: tuple[list[list[int]], int]) -> None:
        blocks, offset = place
        index = 0
        while offset > 0:
            offset -= blocks[index][0]
            index += 1
        blocks[index][1] = 1
        merged: list[list[int]] = []
        for size, is_free in blocks:
            if merged and is_free and merged[-1][1]:
                merged[-1][0] += size
            else:
                merged.append([size, is_free])
        blocks[:] = merged

    def _grow(self, size: int, is_small: bool) -> bool:
        wanted = -(-size // (2 * M)) * 2 * M
        wanted = 2 * M if is_small else 20 * M if size < 10 * M else wanted
        if self.reserved() + wanted > self.capacity and not (
            self._release_oversize(size, is_small) and self.reserved() + wanted <= self.capacity
        ):
            self.num_retries += 1
            self.segments = [s for s in self.segments if not (len(s[1]) == 1 and s[1][0][1])]
        if self.reserved() + wanted > self.capacity:
            return False
        self.segments.append((is_small, [[wanted, 1]]))
        return True

    def _release_oversize(self, size: int, is_small: bool) -> bool:
        if self.max_split is None:
            return False
        wanted = max(size, self.max_split)
        oversize = sorted(
            (blocks[0][0], number)
            for number, (small, blocks) in enumerate(self.segments)
            if small == is_small and blocks[0][1] and blocks[0][0] >= self.max_split
        )
        enough = [number for large, number in oversize if large >= wanted]
        gone = set(enough[:1])
        released = wanted if enough else 0
        while released < wanted and oversize:
            large, number = oversize.pop()
            released += large
            gone.add(number)
        self.segments = [s for n, s in enumerate(self.segments) if n not in gone]
        return released >= wanted


@settings(max_examples=150, deadline=None)
@given(
    max_split=st.sampled_from([None, 20, 32]),
    capacity=st.sampled_from([64 * M, 110 * M, 250 * M, 10**12]),
    operations=st.lists(st.one_of(MALLOC, MALLOC, FREE), min_size=30, max_size=120),
)
def test_a_second_opinion_agrees(
    max_split: int | None, capacity: int, operations: Operations
) -> None:
    text = "" if max_split is None else f"max_split_size_mb:{max_split}"
    allocator = CachingAllocator(config=AllocatorConfig.parse(text), capacity_bytes=capacity)
    plain = Plain(capacity, None if max_split is None else max_split * M)
    live: list[tuple[int, tuple[list[list[int]], int]]] = []
    for name, number, _ in operations:
        if name == "malloc":
            place = plain.malloc(number)
            try:
                address = allocator.malloc(number)
            except SimulatedOomError:
                assert place is None
            else:
                assert place is not None
                live.append((address, place))
        elif live:
            address, place = live.pop(number % len(live))
            allocator.free(address)
            plain.free(place)
        statistics = allocator.statistics
        assert statistics.reserved_bytes.current == plain.reserved()
        assert statistics.num_alloc_retries == plain.num_retries
    states = [[b.size for b in segment.blocks] for segment in allocator.segments()]
    assert states == [[size for size, _ in blocks] for _, blocks in plain.segments]


@given(num_bytes=st.integers(1, 10**12), divisions=st.sampled_from([0, 1, 2, 4, 16]))
def test_blocks_hold_what_was_asked_for(num_bytes: int, divisions: int) -> None:
    config = AllocatorConfig.parse(f"roundup_power2_divisions:{divisions}")
    size = config.block_bytes(num_bytes)
    assert size >= max(num_bytes, 512)
    assert size % 512 == 0
    assert config.block_bytes(size) == size
    assert config.segment_bytes(size) >= size
    if divisions > 1:
        assert size <= max(num_bytes + 512, num_bytes * (1 + 1 / divisions) + 1)


@given(
    config=st.builds(
        AllocatorConfig,
        expandable_segments=st.booleans(),
        max_split_size_bytes=st.none() | st.integers(40, 500).map(lambda size: size * M),
        max_non_split_rounding_bytes=st.none() | st.integers(40, 500).map(lambda size: size * M),
        garbage_collection_threshold=st.floats(0, 1, exclude_max=True),
        large_segment_bytes=st.integers(11, 40).map(lambda size: size * M),
        per_process_memory_fraction=st.floats(0, 1, exclude_min=True),
        roundup_power2_divisions=st.just(())
        | st.tuples(*[st.sampled_from([0, 1, 2, 4, 8])] * 16).filter(any),
    )
)
def test_options_survive_being_written_and_read(config: AllocatorConfig) -> None:
    assert AllocatorConfig.parse(config.text()) == config
