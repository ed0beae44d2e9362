"""What the simulated allocator gives back when memory is short, and what it says if none is left.

M is 1 MiB.
"""

from __future__ import annotations

import pytest

from src.measure.allocator import (
    AllocatorConfig,
    CachingAllocator,
    OomReport,
    SimulatedOomError,
    format_cuda_size,
)

M = 1024**2
G = 1024**3


def reserved(allocator: CachingAllocator) -> int:
    return allocator.statistics.reserved_bytes.current


def test_a_full_device_gives_back_the_cache_and_tries_again() -> None:
    # Capacity 100M, 10M outside: 60M cached + 40M asked > 90M, so the cache goes first.
    allocator = CachingAllocator(capacity_bytes=100 * M, outside_bytes=10 * M)
    plain, waiting = allocator.malloc(36 * M), allocator.malloc(24 * M)
    allocator.record_stream(waiting, stream=1)
    allocator.free(plain)
    allocator.free(waiting)
    allocator.malloc(40 * M)  # waits for stream 1, too
    assert reserved(allocator) == 40 * M
    assert allocator.free_bytes == 50 * M
    assert allocator.statistics.num_alloc_retries == 1
    assert allocator.statistics.num_ooms == 0
    assert allocator.statistics.reserved_bytes.peak == 60 * M


def test_out_of_memory_has_the_numbers_of_cudas_message() -> None:
    # 20M segment with 5M used stays; 100M - 10M - 20M = 70M are free; 71M round up to 72M.
    allocator = CachingAllocator(capacity_bytes=100 * M, outside_bytes=10 * M)
    allocator.malloc(5 * M)
    with pytest.raises(SimulatedOomError) as caught:
        allocator.malloc(71 * M - 7)
    report = caught.value.report
    assert report == OomReport(
        requested_bytes=71 * M - 7,
        tried_bytes=72 * M,
        capacity_bytes=100 * M,
        free_bytes=70 * M,
        process_bytes=30 * M,
        allowed_bytes=None,
        allocated_bytes=5 * M,
        reserved_bytes=20 * M,
    )
    assert report.unallocated_bytes == 15 * M
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 72.00 MiB. GPU 0 has a total capacity of 100.00 MiB "
        "of which 70.00 MiB is free. Including non-PyTorch memory, this process has 30.00 MiB "
        "memory in use. Of the allocated memory 5.00 MiB is allocated by PyTorch, and 15.00 MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert allocator.statistics.num_alloc_retries == allocator.statistics.num_ooms == 1
    allocator.malloc(70 * M)  # it goes on after the failure
    assert allocator.free_bytes == 0


def test_outside_memory_may_grow_while_it_runs() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * M)
    allocator.malloc(40 * M)
    allocator.outside_bytes = 50 * M
    assert allocator.free_bytes == 10 * M
    with pytest.raises(SimulatedOomError, match=r"this process has 90\.00 MiB memory in use"):
        allocator.malloc(20 * M)


def test_memory_fraction_limits_what_is_reserved() -> None:
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    allocator = CachingAllocator(config=config, capacity_bytes=100 * M)
    allocator.malloc(30 * M)
    with pytest.raises(SimulatedOomError) as caught:
        allocator.malloc(22 * M)
    assert caught.value.report.free_bytes == 70 * M
    assert "memory in use. 50.00 MiB allowed; Of the" in str(caught.value)
    allocator.malloc(20 * M)


def test_oversize_blocks_are_neither_split_nor_given_to_smaller_requests() -> None:
    config = AllocatorConfig.parse("max_split_size_mb:40")
    allocator = CachingAllocator(config=config)
    oversize = allocator.malloc(60 * M)
    allocator.free(oversize)
    other = allocator.malloc(30 * M)  # 30M < 40M <= 60M: refused
    assert reserved(allocator) == 90 * M
    assert other != oversize
    allocator.malloc(40 * M)  # 60M >= 40M + 20M of rounding: refused
    assert reserved(allocator) == 130 * M
    taken = allocator.malloc(40 * M + 512)  # 60M < 60M + 512: taken whole
    assert taken == oversize
    assert allocator.block_bytes(taken) == 60 * M


def test_a_full_device_gives_back_one_oversize_block_before_everything() -> None:
    # 50M, 90M and 20M are cached, the device is full. 90M is too large for 55M to reuse (from 75M
    # on), but it is the smallest that makes room; the others stay.
    config = AllocatorConfig.parse("max_split_size_mb:40,max_non_split_rounding_mb:20")
    allocator = CachingAllocator(config=config, capacity_bytes=160 * M)
    addresses = [allocator.malloc(size * M) for size in (50, 90, 20)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(55 * M)
    assert reserved(allocator) == (50 + 20 + 56) * M
    assert allocator.statistics.num_alloc_retries == 0


def test_oversize_blocks_go_from_the_largest_until_there_is_room() -> None:
    # 42M, 44M, 46M cached in 132M. 80M: no single one suffices; 46M + 44M = 90M do, 42M stays.
    config = AllocatorConfig.parse("max_split_size_mb:40")
    allocator = CachingAllocator(config=config, capacity_bytes=132 * M)
    for address in [allocator.malloc(size * M) for size in (42, 44, 46)]:
        allocator.free(address)
    allocator.malloc(80 * M)
    assert reserved(allocator) == 122 * M
    assert allocator.statistics.num_alloc_retries == 0


@pytest.mark.parametrize(("last", "left"), [(46 * M, 160 * M), (48 * M, 138 * M)])
def test_garbage_collection_gives_back_the_older_blocks_first(last: int, left: int) -> None:
    """Half of 400M is allowed, half of that is the threshold: 100M.

    An age counts searches of the large pool since the free. At the fifth search 20M is 3 old and
    24M is 2 old, so the first pass, from an average of 2.5, gives back 20M. With 46M last, 120M are
    reserved: the excess of 20M is met, 24M stays, 120 - 20 + 60 = 160M. With 48M it is 22M, so a
    second pass takes 24M as well: 122 - 44 + 60 = 138M.
    """
    config = AllocatorConfig.parse(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    )
    allocator = CachingAllocator(config=config, capacity_bytes=400 * M)
    older, younger = allocator.malloc(20 * M), allocator.malloc(24 * M)
    allocator.free(older)
    allocator.malloc(30 * M)
    allocator.free(younger)
    allocator.malloc(last)
    assert reserved(allocator) == 74 * M + last
    allocator.malloc(60 * M)
    assert reserved(allocator) == left
    assert allocator.statistics.num_alloc_retries == 0


def test_garbage_collection_needs_a_memory_fraction() -> None:
    # 60M cached of 100M is above the threshold of 50M, but nothing is allowed or not: 90M stay.
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(config=config, capacity_bytes=100 * M)
    allocator.free(allocator.malloc(60 * M))
    allocator.malloc(30 * M, stream=1)
    assert reserved(allocator) == 90 * M


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (M, "1024.00 KiB"),
        (20 * M, "20.00 MiB"),
        (G, "1024.00 MiB"),
        (80 * G, "80.00 GiB"),
    ],
)
def test_sizes_print_as_in_pytorchs_messages(num_bytes: int, text: str) -> None:
    assert format_cuda_size(num_bytes) == text
