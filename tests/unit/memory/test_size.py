"""Bytes as a function of micro batch and sequence."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.memory.size import (
    ZERO,
    Shape,
    Size,
    fixed,
    per_score,
    per_token,
    total,
    undominated,
)
from tests.strategies import shapes, sizes


@dataclasses.dataclass(frozen=True)
class Item:
    size: Size


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [
        (fixed(7), 7),
        (per_token(2), 2 * 3 * 200),
        (per_score(2), 2 * 3 * 200 * 200),
        (Size(per_padded=2), 2 * 3 * 256),  # 200 positions are padded to 256
        (Size(per_position=2), 2 * 200),  # the batch shares a position's row
        (Size(per_sliced=2), 2 * 3 * 200),
    ],
)
def test_each_coefficient_has_its_letters(size: Size, bytes_: int) -> None:
    assert size.at(Shape.of(3, 200)) == bytes_


def test_a_lone_sequence_is_sliced_without_a_copy() -> None:
    lone = Shape.of(1, 200)
    assert Size(per_sliced=2).at(lone) == 0
    assert lone.repeated(3) == Shape.of(3, 200)._replace(positions=200, rows=3 * lone.rows)
    assert Size(per_sliced=2).at(lone.repeated(0.5)) == 0


@pytest.mark.parametrize(("seq_len", "padded"), [(1, 128), (128, 128), (129, 256), (4096, 4096)])
def test_padding_is_up_to_whole_runs_of_128(seq_len: int, padded: int) -> None:
    assert Shape.of(1, seq_len).padded == padded


@given(left=sizes(), right=sizes(), shape=shapes())
def test_sums_are_sums_at_every_shape(left: Size, right: Size, shape: Shape) -> None:
    assert left.plus(right).at(shape) == left.at(shape) + right.at(shape)
    assert total([left, right, ZERO]) == left.plus(right)
    assert left.times(3).at(shape) == 3 * left.at(shape)


@given(size=sizes(), batches=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_a_shape_of_arrays_gives_an_array(size: Size, batches: list[int]) -> None:
    size = size.times(1 / 1024)
    many = size.at(Shape.of(numpy.array(batches), 100))
    assert many.tolist() == pytest.approx([size.at(Shape.of(batch, 100)) for batch in batches])


@given(pool=st.lists(sizes(), max_size=6), shape=shapes())
def test_pruning_never_loses_the_largest(pool: list[Size], shape: Shape) -> None:
    kept = undominated(Item(size) for size in pool)
    assert {item.size for item in kept} <= set(pool)
    largest = max((size.at(shape) for size in pool), default=None)
    assert largest == max((item.size.at(shape) for item in kept), default=None)


def test_pruning_keeps_what_is_largest_at_some_shape_only() -> None:
    constant, growing, smaller = fixed(100), per_token(1), fixed(99)
    kept = undominated([Item(smaller), Item(growing), Item(constant), Item(constant)])
    assert sorted(item.size for item in kept) == sorted([constant, growing])
