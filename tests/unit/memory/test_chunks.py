"""Gemini's chunk search against the search written out, and by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.memory.chunks import SEARCH_INTERVAL, SEARCH_RANGE, chunk_elements, num_chunks

MI = 1024**2
KI = 1024


def wasted(tensors: list[int], size: int) -> int:
    """Elements left over where each tensor that does not fit opens a new chunk."""
    left = over = 0
    for numel in tensors:
        if numel > left:
            over += left
            left = size
        left -= numel
    return over + left


def tried_one_by_one(tensors: list[int], start: int) -> int:
    sizes = range(start, start + SEARCH_RANGE + 1, SEARCH_INTERVAL)
    return min(sizes, key=lambda size: wasted(tensors, size))  # the first of equals


@settings(max_examples=15, deadline=None)
@given(tensors=st.lists(st.integers(8 * MI, 32 * MI), min_size=4, max_size=9))
def test_the_search_finds_what_trying_every_size_finds(tensors: list[int]) -> None:
    assert chunk_elements(tensors, group=1) == tried_one_by_one(tensors, 32 * MI)


def test_equal_tensors_fill_a_chunk_of_a_multiple_of_them() -> None:
    # 12 of 10 Mi: four chunks of 32 Mi waste 8 Mi, three of 40 Mi nothing
    assert chunk_elements([10 * MI] * 12, group=1) == 40 * MI


def test_a_small_model_is_one_chunk_of_its_own_size() -> None:
    assert chunk_elements([5 * MI, 3 * MI + 7], group=4) == 8 * MI + 7


def test_a_tensor_beyond_three_deviations_takes_no_part() -> None:
    # mean 11.57 Mi, deviation 15.6 Mi: 256 Mi is out, and 64 tensors of 8 Mi fill chunks of 32 Mi
    assert chunk_elements([256 * MI] + [8 * MI] * 64, group=1) == 32 * MI


def test_a_large_tensor_that_takes_part_is_the_start() -> None:
    # mean 28 Mi, deviation 12 Mi: 40 Mi stays in, and nothing wastes less than 40 Mi
    assert chunk_elements([40 * MI, 40 * MI, 16 * MI, 24 * MI], group=1) == 40 * MI


@pytest.mark.parametrize(("group", "size"), [(1, 32 * MI), (3, 32 * MI + 1), (7, 32 * MI + 5)])
def test_a_chunk_is_dealt_out_evenly(group: int, size: int) -> None:
    found = chunk_elements([16 * MI] * 4, group=group)
    assert found % group == 0
    assert found == size


def test_the_start_is_a_multiple_of_the_interval() -> None:
    # 33 Mi + 1 starts at the next multiple of 1024
    assert chunk_elements([33 * MI + 1] * 3, group=1) == 33 * MI + KI


@given(
    tensors=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    size=st.integers(100, 400),
    more=st.integers(0, 100),
)
def test_chunks_are_filled_in_order(tensors: list[int], size: int, more: int) -> None:
    ends = [0, *accumulate(tensors)]
    count = num_chunks(ends, size)
    assert count * size - sum(tensors) == wasted(tensors, size)
    assert num_chunks(ends, size + more) <= count
