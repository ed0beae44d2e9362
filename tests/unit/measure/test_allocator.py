"""The simulated caching allocator on sequences computed by hand. M is 1 MiB, K is 1 KiB."""

from __future__ import annotations

import time

import pytest

from src.measure.allocator import (
    AllocatorEvent,
    BlockStatus,
    CachingAllocator,
    SimulatedOomError,
    TraceAction,
)

K = 1024
M = 1024**2
G = 1024**3


def reserved(allocator: CachingAllocator) -> int:
    return allocator.statistics.reserved_bytes.current


def allocated(allocator: CachingAllocator) -> int:
    return allocator.statistics.allocated_bytes.current


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes", "segment_bytes"),
    [
        (1, 512, 2 * M),  # never below 512 B; small pool: a 2 MiB segment
        (512, 512, 2 * M),
        (513, 1024, 2 * M),
        (M, M, 2 * M),  # the largest small block
        (M + 1, M + 512, 20 * M),  # 1 to 10 MiB: a 20 MiB segment
        (10 * M - 512, 10 * M - 512, 20 * M),
        (10 * M, 10 * M, 10 * M),  # from 10 MiB on: the next multiple of 2 MiB
        (10 * M + 1, 10 * M + 512, 12 * M),
        (33 * M, 33 * M, 34 * M),
    ],
)
def test_one_allocation(num_bytes: int, block_bytes: int, segment_bytes: int) -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(num_bytes)
    # 10M + 512 in 12M leaves 2M - 512 and 33M in 34M leaves 1M exactly, which is not split off.
    assert allocator.block_bytes(address) == block_bytes + (M if num_bytes == 33 * M else 0)
    assert reserved(allocator) == segment_bytes
    assert allocator.statistics.requested_bytes.current == num_bytes


def test_small_blocks_share_a_segment() -> None:
    # 2M / 512K = 4 blocks fill one segment; the fifth needs another: 4M reserved, 2.5M allocated.
    allocator = CachingAllocator()
    addresses = [allocator.malloc(512 * K) for _ in range(5)]
    assert [a - addresses[0] for a in addresses[:4]] == [0, 512 * K, 1024 * K, 1536 * K]
    assert allocated(allocator) == 2560 * K
    assert reserved(allocator) == 4 * M
    assert allocator.statistics.num_segments == 2


def test_small_pool_keeps_a_rest_of_512_bytes() -> None:
    # Two of 1M - 512 leave 2M - 2 * (1M - 512) = 1K; a third block of 512 takes half of that.
    allocator = CachingAllocator()
    allocator.malloc(M - 512)
    second = allocator.malloc(M - 512)
    third = allocator.malloc(512)
    assert third == second + M - 512
    assert reserved(allocator) == 2 * M


def test_large_pool_keeps_a_rest_only_above_1_mib() -> None:
    # 9M from a 20M segment leaves 11M, 10M of that leaves 1M: not above 1M, so the block is 11M.
    allocator = CachingAllocator()
    allocator.malloc(9 * M)
    second = allocator.malloc(10 * M)
    assert allocator.block_bytes(second) == 11 * M
    assert allocated(allocator) == reserved(allocator) == 20 * M
    # With 512 B less the rest is 1M + 512 and is kept apart.
    other = CachingAllocator()
    other.malloc(9 * M)
    assert other.block_bytes(other.malloc(10 * M - 512)) == 10 * M - 512


def test_small_and_large_blocks_never_mix() -> None:
    # The 20M segment has 18M free, yet a small block opens a 2M segment of its own.
    allocator = CachingAllocator()
    allocator.malloc(2 * M)
    allocator.malloc(M)
    assert reserved(allocator) == 22 * M


def test_best_fit_is_the_smallest_block_that_fits_then_the_lowest_address() -> None:
    allocator = CachingAllocator()
    sizes = (30 * M, 14 * M, 14 * M, 12 * M)
    first, low, high, small = (allocator.malloc(size) for size in sizes)
    for address in (first, high, low, small):
        allocator.free(address)
    # 13M does not fit 12M; of the two of 14M the lower address comes first, then the other.
    assert allocator.malloc(13 * M) == low
    assert allocator.malloc(13 * M) == high
    assert allocator.malloc(13 * M) == first
    assert reserved(allocator) == 70 * M


def test_free_merges_neighbours_of_the_segment() -> None:
    # 20M = 4 x 5M. Freeing the 2nd and the 4th leaves two holes of 5M; the 3rd joins them to 15M.
    allocator = CachingAllocator()
    a, b, c, d = (allocator.malloc(5 * M) for _ in range(4))
    allocator.free(b)
    allocator.free(d)
    (segment,) = allocator.segments()
    assert [(block.size // M, block.status) for block in segment.blocks] == [
        (5, BlockStatus.ALLOCATED),
        (5, BlockStatus.INACTIVE),
        (5, BlockStatus.ALLOCATED),
        (5, BlockStatus.INACTIVE),
    ]
    allocator.free(c)
    (segment,) = allocator.segments()
    assert [block.size // M for block in segment.blocks] == [5, 15]
    allocator.free(a)
    (segment,) = allocator.segments()
    assert [block.size // M for block in segment.blocks] == [20]
    assert allocated(allocator) == 0
    assert reserved(allocator) == 20 * M


def test_segments_do_not_merge_with_each_other() -> None:
    # Eight free segments of 16M do not make one of 32M: 128M + 32M are reserved.
    allocator = CachingAllocator()
    for address in [allocator.malloc(16 * M) for _ in range(8)]:
        allocator.free(address)
    allocator.malloc(32 * M)
    assert reserved(allocator) == 160 * M


def test_peaks_and_their_reset() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(30 * M - 100)
    second = allocator.malloc(10 * M)
    allocator.free(first)
    statistics = allocator.statistics
    assert statistics.allocated_bytes.peak == 40 * M
    assert statistics.requested_bytes.peak == 40 * M - 100
    assert (statistics.reserved_bytes.current, statistics.reserved_bytes.peak) == (40 * M, 40 * M)
    allocator.empty_cache()
    assert reserved(allocator) == 10 * M
    allocator.reset_peak()
    assert statistics.allocated_bytes.peak == statistics.reserved_bytes.peak == 10 * M
    allocator.free(second)


def test_empty_cache_keeps_segments_that_are_partly_used() -> None:
    # 20M segment with 5M in use stays whole; the free 12M segment goes.
    allocator = CachingAllocator()
    allocator.malloc(5 * M)
    allocator.free(allocator.malloc(5 * M))
    allocator.free(allocator.malloc(16 * M))
    assert reserved(allocator) == 36 * M
    allocator.empty_cache()
    assert reserved(allocator) == 20 * M


def test_streams_have_blocks_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * M, stream=0))
    allocator.malloc(12 * M, stream=7)
    assert reserved(allocator) == 24 * M
    assert sorted(segment.stream for segment in allocator.segments()) == [0, 7]


def test_record_stream_delays_reuse_until_the_event_is_complete() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(12 * M)
    allocator.record_stream(address, stream=7)
    allocator.free(address)
    statistics = allocator.statistics
    assert (allocated(allocator), statistics.active_bytes.current) == (0, 12 * M)
    assert allocator.segments()[0].blocks[0].status is BlockStatus.PENDING_FREE
    assert allocator.malloc(12 * M) != address  # 24M reserved: the first block still waits
    allocator.synchronize(stream=5)
    assert allocator.malloc(12 * M) != address  # another stream's progress says nothing
    assert reserved(allocator) == 36 * M
    allocator.synchronize(stream=7)
    assert statistics.active_bytes.current == 36 * M  # told at the next malloc, as PyTorch is
    assert allocator.malloc(12 * M) == address
    assert reserved(allocator) == 36 * M


def test_a_block_waits_for_every_stream_and_marks_count_events() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(12 * M), allocator.malloc(14 * M)
    for stream in (7, 8):
        allocator.record_stream(first, stream=stream)
    allocator.free(first)
    mark = allocator.mark(stream=7)
    allocator.record_stream(second, stream=7)
    allocator.free(second)
    assert (mark, allocator.mark(stream=7), allocator.mark(stream=8)) == (1, 2, 1)
    active = allocator.statistics.active_bytes
    allocator.synchronize(stream=7, until=mark)
    allocator.process_events()
    assert active.current == 26 * M  # the first waits for stream 8, the second for stream 7
    allocator.synchronize(stream=8)
    allocator.process_events()
    assert active.current == 14 * M
    allocator.synchronize()
    allocator.process_events()
    assert active.current == 0


def test_use_on_its_own_stream_delays_nothing() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(12 * M, stream=3)
    allocator.record_stream(address, stream=3)
    allocator.free(address)
    assert allocator.malloc(12 * M, stream=3) == address


def test_blocks_do_not_merge_with_one_that_waits() -> None:
    # 5M | 5M | 10M; the middle waits, so freeing the first leaves 5M apart until it is done.
    allocator = CachingAllocator()
    first, second = allocator.malloc(5 * M), allocator.malloc(5 * M)
    allocator.record_stream(second, stream=1)
    allocator.free(second)
    allocator.free(first)
    assert [block.size // M for block in allocator.segments()[0].blocks] == [5, 5, 10]
    allocator.synchronize()
    allocator.process_events()
    assert [block.size // M for block in allocator.segments()[0].blocks] == [20]


def test_the_trace_is_in_pytorchs_order() -> None:
    events: list[AllocatorEvent] = []
    allocator = CachingAllocator(capacity_bytes=30 * M, observer=events.append)
    address = allocator.malloc(3 * M - 1, stream=2)
    allocator.free(address)
    with pytest.raises(SimulatedOomError):
        allocator.malloc(40 * M)
    segment = address
    assert events == [
        (TraceAction.SEGMENT_ALLOC, segment, 20 * M, 2),
        (TraceAction.ALLOC, address, 3 * M - 1, 2),
        (TraceAction.FREE_REQUESTED, address, 3 * M - 1, 2),
        (TraceAction.FREE_COMPLETED, address, 3 * M - 1, 2),
        (TraceAction.SEGMENT_FREE, segment, 20 * M, 2),
        (TraceAction.OOM, 30 * M, 40 * M, 0),
    ]


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(KeyError):
        allocator.free(address)
    waiting = allocator.malloc(1)
    allocator.record_stream(waiting, stream=1)
    allocator.free(waiting)
    with pytest.raises(AssertionError, match="was freed before"):
        allocator.free(waiting)


def test_two_hundred_thousand_events_take_seconds() -> None:
    allocator = CachingAllocator(capacity_bytes=80 * G)
    live: list[int] = []
    start = time.perf_counter()
    for index in range(100_000):
        live.append(allocator.malloc(1 + index * 7919 % (24 * M), stream=index % 3))
        if len(live) > 2_000:
            allocator.free(live.pop(index * 31 % len(live)))
    for address in live:
        allocator.free(address)
    assert time.perf_counter() - start < 10  # 1 to 2 s; the rest is for a busy machine
