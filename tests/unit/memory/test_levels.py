"""From allocated to reserved and device bytes, and the upper bound of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from src.memory import LevelModel
from src.memory.levels import (
    HOLES,
    SLACK_AT_CAPACITY,
    upper_levels,
    upper_outside,
    upper_room,
)
from src.units import GIB, Levels

CAPACITY = 80 * GIB
MODEL = LevelModel(capacity=CAPACITY, outside=GIB)
BYTES = st.integers(0, 200 * GIB)


@given(allocated=BYTES)
def test_levels_and_their_bounds_are_ordered(allocated: int) -> None:
    for levels in (MODEL.estimate(allocated), MODEL.upper(allocated)):
        assert levels.allocated <= levels.reserved <= levels.device
        assert all(isinstance(value, int) for value in (levels.reserved, levels.device))
    estimate, upper = MODEL.estimate(allocated), MODEL.upper(allocated)
    assert estimate.allocated == allocated
    assert upper.allocated >= allocated
    assert upper.reserved >= estimate.reserved
    assert upper.device >= estimate.device


@given(allocated=BYTES, more=st.integers(1, GIB))
def test_levels_never_fall_as_allocated_grows(allocated: int, more: int) -> None:
    for levels_of in (MODEL.estimate, MODEL.upper):
        low, high = levels_of(allocated), levels_of(allocated + more)
        assert low.reserved <= high.reserved
        assert low.device <= high.device


@given(allocated=BYTES)
def test_a_full_card_gives_its_cache_back_before_it_fails(allocated: int) -> None:
    """Within capacity just where the tensors, what fragmentation must cost, and the rest are."""
    least = allocated * (1 + SLACK_AT_CAPACITY) + MODEL.outside
    assert (MODEL.estimate(allocated).device <= CAPACITY) == (round(least) <= CAPACITY)


@given(allocated=BYTES)
def test_what_surely_fits_would_also_fit_by_the_estimate(allocated: int) -> None:
    if MODEL.upper(allocated).device <= CAPACITY:
        assert MODEL.estimate(allocated).device <= CAPACITY


@given(allocated=BYTES, outside=st.integers(0, 4 * GIB), slack=st.floats(0.2, 0.5))
def test_the_room_is_where_the_upper_bound_meets_the_card(
    allocated: int, outside: int, slack: float
) -> None:
    """Both estimators bound a full card alike, and the search for a batch aims at that bound."""
    estimate = Levels(allocated=allocated, reserved=allocated, device=allocated + outside)
    freely = allocated * (1 + slack)
    upper = upper_levels(estimate, freely=freely, outside=outside, capacity=CAPACITY)
    room = upper_room(outside=upper_outside(outside), capacity=CAPACITY)
    assert (upper.device <= CAPACITY) == (upper.allocated <= room + 1)


def test_an_empty_card_keeps_what_lies_between_blocks() -> None:
    levels = MODEL.estimate(10 * GIB)
    assert levels.reserved == round(10 * GIB * (1 + HOLES))
    assert levels.device == levels.reserved + GIB


def test_pools_keep_what_they_once_needed() -> None:
    levels = MODEL.estimate(10 * GIB, pooled=12 * GIB)
    assert levels.allocated == 10 * GIB
    assert levels.reserved == 12 * GIB
    assert MODEL.upper(10 * GIB, pooled=12 * GIB).reserved > levels.reserved


@given(allocated=BYTES, pooled=BYTES)
def test_pools_do_not_matter_on_a_full_card(allocated: int, pooled: int) -> None:
    """So they need not be replayed where the search for a batch has gone too far."""
    if MODEL.is_full(allocated):
        assert MODEL.estimate(allocated, pooled=pooled) == MODEL.estimate(allocated)
        assert MODEL.upper(allocated, pooled=pooled) == MODEL.upper(allocated)


@given(allocated=BYTES, pooled=BYTES)
def test_pools_never_decide_whether_a_step_fits(allocated: int, pooled: int) -> None:
    """They may fall as the batch grows; what fits must go on fitting for every smaller one."""
    fits = MODEL.upper(allocated, pooled=pooled).device <= CAPACITY
    assert fits == (MODEL.upper(allocated, pooled=100 * CAPACITY).device <= CAPACITY)
