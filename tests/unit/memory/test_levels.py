"""From allocated to reserved and device bytes, and the upper bound of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.memory import Instant, LevelModel, Term, estimate_step
from src.memory.estimate import pooled_bytes
from src.memory.levels import (
    SLACK_AT_CAPACITY,
    upper_levels,
    upper_outside,
    upper_room,
)
from src.spec import Job, Method
from src.units import GIB, Levels
from tests.jobs import step_of, zoo_model

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


def test_an_empty_card_keeps_its_slack() -> None:
    levels = MODEL.estimate(10 * GIB)
    assert levels.reserved == round(11.4 * GIB)
    assert levels.device == round(12.4 * GIB)


def test_pools_keep_what_they_once_needed() -> None:
    levels = MODEL.estimate(10 * GIB, pooled=12 * GIB)
    assert levels.allocated == 10 * GIB
    assert levels.reserved == round(12 * 1.14 * GIB)
    assert MODEL.upper(10 * GIB, pooled=12 * GIB).reserved > levels.reserved


def test_each_streams_pool_is_taken_at_its_largest() -> None:
    ledger = {
        Instant.LOAD: {Term.WEIGHTS: 1000},
        Instant.FORWARD_END: {Term.WEIGHTS: 100, Term.GATHERED_WEIGHTS: 40, Term.LOGITS: 60},
        Instant.LAST_BLOCK_BACKWARD: {
            Term.WEIGHTS: 100,
            Term.GATHERED_WEIGHTS: 30,
            Term.COMMUNICATION_BUFFERS: 20,
        },
    }
    assert pooled_bytes(ledger) == 160 + 40 + 20


@pytest.mark.parametrize("method", Method)
def test_pools_are_the_peak_where_there_is_one_stream(method: Method) -> None:
    step = step_of(
        Job(model=zoo_model("opt-350m")), method, gpus=1 if method is Method.SINGLE else 4
    )
    estimate = estimate_step(step)
    pooled = pooled_bytes(estimate.ledger)
    assert pooled >= estimate.peak_bytes.allocated - 2
    if method is Method.SINGLE:
        assert pooled == pytest.approx(estimate.peak_bytes.allocated, abs=2)
    if method.is_fsdp:
        assert pooled > 1.01 * estimate.peak_bytes.allocated
