"""Expandable segments of the simulated allocator on sequences computed by hand. M is 1 MiB."""

from __future__ import annotations

import pytest

from src.measure.allocator import (
    AllocatorConfig,
    AllocatorEvent,
    CachingAllocator,
    SimulatedOomError,
    TraceAction,
)

M = 1024**2
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def reserved(allocator: CachingAllocator) -> int:
    return allocator.statistics.reserved_bytes.current


def mapped(allocator: CachingAllocator) -> list[int]:
    """MiB of each mapped range, by address."""
    return [segment.size // M for segment in allocator.segments()]


def test_a_segment_grows_by_pages_of_20_mib_and_blocks_are_contiguous() -> None:
    # 16M map one page, 4M are left; 16M more need 12M: another page. 40M mapped, 8M free.
    allocator = CachingAllocator(config=EXPANDABLE)
    first = allocator.malloc(16 * M)
    assert reserved(allocator) == 20 * M
    second = allocator.malloc(16 * M)
    assert second == first + 16 * M
    assert reserved(allocator) == 40 * M
    (segment,) = allocator.segments()
    assert segment.is_expandable
    assert [block.size // M for block in segment.blocks] == [16, 16, 8]


def test_small_blocks_map_pages_of_2_mib() -> None:
    # Five blocks of 512K are 2.5M: two pages of one segment.
    allocator = CachingAllocator(config=EXPANDABLE)
    addresses = [allocator.malloc(M // 2) for _ in range(5)]
    assert addresses[4] == addresses[0] + 2 * M
    assert reserved(allocator) == 4 * M
    assert mapped(allocator) == [4]


def test_freed_blocks_join_to_larger_ones() -> None:
    # 8 x 16M = 128M in 7 pages; freed they are one range of 140M that serves 4 x 32M at once.
    allocator = CachingAllocator(config=EXPANDABLE)
    for address in [allocator.malloc(16 * M) for _ in range(8)]:
        allocator.free(address)
    for _ in range(4):
        allocator.malloc(32 * M)
    assert reserved(allocator) == 140 * M


def test_any_rest_of_512_bytes_is_split_off() -> None:
    # In the large pool of plain segments 20M - 512 would take the whole 20M.
    allocator = CachingAllocator(config=EXPANDABLE)
    assert allocator.block_bytes(allocator.malloc(20 * M - 512)) == 20 * M - 512


def test_growth_starts_in_the_free_end_of_the_segment() -> None:
    # 30M: two pages, 10M free at the end; 25M take those 10M and 15M more: one page.
    allocator = CachingAllocator(config=EXPANDABLE)
    first = allocator.malloc(30 * M)
    assert allocator.malloc(25 * M) == first + 30 * M
    assert reserved(allocator) == 60 * M


def test_empty_cache_unmaps_whole_pages_only_and_gaps_are_filled_first() -> None:
    # Pages 0 to 4 hold 10M | 70M | 20M; freeing 70M frees 10..80: pages 1, 2 and 3 go, 60M.
    events: list[AllocatorEvent] = []
    allocator = CachingAllocator(config=EXPANDABLE, observer=events.append)
    first, middle, _ = (allocator.malloc(size * M) for size in (10, 70, 20))
    assert reserved(allocator) == 100 * M
    allocator.free(middle)
    allocator.empty_cache()
    assert reserved(allocator) == 40 * M
    assert mapped(allocator) == [20, 20]
    assert events[-1] == (TraceAction.SEGMENT_UNMAP, first + 20 * M, 60 * M, 0)
    # 40M fit nowhere that is mapped; the lowest room starts in the free 10M of page 0: 2 pages.
    assert allocator.malloc(40 * M) == first + 10 * M
    assert reserved(allocator) == 80 * M
    assert mapped(allocator) == [60, 20]


def test_an_empty_segment_is_given_up() -> None:
    allocator = CachingAllocator(config=EXPANDABLE)
    first = allocator.malloc(30 * M)
    allocator.free(first)
    allocator.empty_cache()
    assert reserved(allocator) == 0
    assert allocator.segments() == ()
    assert allocator.malloc(30 * M) != first


def test_streams_and_pools_have_segments_of_their_own() -> None:
    # Large on stream 0, large on stream 1, small on stream 0: 20M + 20M + 2M.
    allocator = CachingAllocator(config=EXPANDABLE)
    allocator.free(allocator.malloc(16 * M))
    allocator.malloc(16 * M, stream=1)
    allocator.malloc(1)
    assert sorted(mapped(allocator)) == [2, 20, 20]


def test_a_full_device_unmaps_pages_of_other_streams() -> None:
    # 100M; stream 1 has 60M mapped and nothing in use, stream 0 asks for 80M: 60M go, 80M come.
    allocator = CachingAllocator(config=EXPANDABLE, capacity_bytes=100 * M)
    allocator.free(allocator.malloc(60 * M, stream=1))
    allocator.malloc(80 * M)
    assert reserved(allocator) == 80 * M
    assert allocator.statistics.num_alloc_retries == 1


def test_pages_round_up_against_the_capacity() -> None:
    # 45M hold two pages of 20M, not three: 41M fail. The failed try leaves nothing mapped.
    allocator = CachingAllocator(config=EXPANDABLE, capacity_bytes=45 * M)
    with pytest.raises(SimulatedOomError) as caught:
        allocator.malloc(41 * M)
    assert caught.value.report.tried_bytes == 42 * M
    assert reserved(allocator) == 0
    allocator.malloc(40 * M)
    assert allocator.free_bytes == 5 * M


def test_a_waiting_block_is_not_grown_into() -> None:
    # 10M at the end of page 1 wait for stream 1; 20M start behind them, on page 2.
    allocator = CachingAllocator(config=EXPANDABLE)
    allocator.malloc(10 * M)
    waiting = allocator.malloc(10 * M)
    allocator.record_stream(waiting, stream=1)
    allocator.free(waiting)
    assert allocator.malloc(20 * M) == waiting + 10 * M
    assert reserved(allocator) == 40 * M


def test_the_block_that_can_grow_least_comes_first() -> None:
    # A hole of 12M between blocks and 4M free at the end. The end is the better fit for 3M, but it
    # can grow to the whole card; what cannot grow is used first.
    allocator = CachingAllocator(config=EXPANDABLE, capacity_bytes=1000 * M)
    _, hole, last = (allocator.malloc(size * M) for size in (4, 12, 20))
    allocator.free(hole)  # 4 | (12) | 20 | (4)
    assert allocator.malloc(3 * M) == hole
    assert allocator.malloc(9 * M) == hole + 3 * M
    assert allocator.malloc(3 * M) == last + 20 * M


def test_switching_options_while_running() -> None:
    """PyTorch's own `test_max_split_expandable`: plain, expandable and plain blocks of 40M in 120M.

    A fourth does not fit; when all are free, 120M do, from a release of all three.
    """
    plain = AllocatorConfig.parse("max_split_size_mb:40,expandable_segments:False")
    expandable = AllocatorConfig.parse("max_split_size_mb:40,expandable_segments:True")
    allocator = CachingAllocator(config=plain, capacity_bytes=120 * M)
    blocks = [allocator.malloc(40 * M)]
    allocator.reconfigure(expandable)
    blocks.append(allocator.malloc(40 * M))
    allocator.reconfigure(plain)
    blocks.append(allocator.malloc(40 * M))
    with pytest.raises(SimulatedOomError):
        allocator.malloc(40 * M)
    for block in blocks:
        allocator.free(block)
    allocator.malloc(120 * M)
    assert reserved(allocator) == 120 * M


def test_garbage_collection_leaves_expandable_blocks_alone() -> None:
    """PyTorch's own `test_garbage_collect_expandable`: 40M plain and 40M expandable of 120M.

    Once expandable segments are off, a request for 40M takes the plain block.
    """
    limits = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    plain = AllocatorConfig.parse(limits)
    allocator = CachingAllocator(config=plain, capacity_bytes=240 * M)
    first = allocator.malloc(40 * M)
    allocator.reconfigure(AllocatorConfig.parse(f"{limits},expandable_segments:True"))
    allocator.free(allocator.malloc(40 * M, stream=0))
    allocator.free(first)
    allocator.malloc(80 * M)  # 80M reserved > 60M: the plain block goes, the other grows to 80M
    assert reserved(allocator) == 80 * M
    allocator.reconfigure(plain)
    assert allocator.malloc(40 * M) != first
    assert reserved(allocator) == 120 * M
