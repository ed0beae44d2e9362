"""Segments that a sequence of moments needs, against the simulated allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.measure.allocator import CachingAllocator
from src.memory.segments import SHARED_SEGMENT, held_bytes, segment_size
from src.units import MIB

MOMENTS = st.lists(
    st.dictionaries(st.sampled_from([12 * MIB, 32 * MIB, 100 * MIB]), st.integers(1, 4)),
    min_size=1,
    max_size=5,
)


def replayed(moments: list[dict[int, int]]) -> int:
    """Bytes that the simulated allocator holds: moments of `count` blocks of each size, apart."""
    allocator = CachingAllocator()
    for counts in moments:
        live = [
            allocator.malloc(size)
            for size in sorted(counts, reverse=True)
            for _ in range(counts[size])
        ]
        for address in live:
            allocator.free(address)
    return allocator.statistics.reserved_bytes.peak


def held(moments: list[dict[int, int]]) -> float:
    return held_bytes(
        [{segment_size(size): size * count for size, count in one.items()} for one in moments]
    )


@given(moments=MOMENTS)
def test_the_allocator_never_holds_less(moments: list[dict[int, int]]) -> None:
    assert held(moments) <= replayed(moments)


@given(moments=MOMENTS)
def test_no_moment_needs_more_than_what_is_held(moments: list[dict[int, int]]) -> None:
    assert held(moments) >= max(sum(s * n for s, n in one.items()) for one in moments)
    assert held(moments) >= held(moments[:-1])


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ([{32 * MIB: 4}, {100 * MIB: 1}], 228),  # small blocks that are free serve no large one
        ([{100 * MIB: 1}, {32 * MIB: 3}], 100),  # a large one serves small ones
        ([{32 * MIB: 4}, {100 * MIB: 1}, {32 * MIB: 7}], 228),
        ([{100 * MIB: 1, 32 * MIB: 1}, {32 * MIB: 3}], 132),
    ],
)
def test_what_is_stranded(moments: list[dict[int, int]], expected: int) -> None:
    assert held(moments) == replayed(moments) == expected * MIB


def test_blocks_up_to_ten_mebibytes_share_segments() -> None:
    assert segment_size(1) == segment_size(10 * MIB) == SHARED_SEGMENT
    assert segment_size(10 * MIB + 1) == 12 * MIB
    assert segment_size(31 * MIB) == 32 * MIB
