"""From allocated to reserved and device bytes, and the upper bound of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.memory import LevelModel, estimate_step
from src.memory.columns import answer
from src.memory.levels import (
    SLACK_AT_CAPACITY,
    upper_levels,
    upper_outside,
    upper_room,
)
from src.memory.parts import parts_of
from src.memory.size import ZERO, Shape
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
    assert levels.reserved == round(11.2 * GIB)
    assert levels.device == round(12.2 * GIB)


def test_pools_keep_what_they_once_needed() -> None:
    levels = MODEL.estimate(10 * GIB, pooled=12 * GIB)
    assert levels.allocated == 10 * GIB
    assert levels.reserved == round(12 * 1.12 * GIB)
    assert MODEL.upper(10 * GIB, pooled=12 * GIB).reserved > levels.reserved


@pytest.mark.parametrize("method", Method)
def test_pools_are_the_peak_where_there_is_one_stream(method: Method) -> None:
    step = step_of(
        Job(model=zoo_model("opt-350m")), method, gpus=1 if method is Method.SINGLE else 4
    )
    peak = estimate_step(step).peak_bytes.allocated
    found = answer(step.job, method, step.layout, step.gpu).pools
    pooled = found.at(Shape.of(step.micro_batch, step.job.seq_len))
    assert pooled >= peak - 2
    if method is Method.SINGLE:
        assert found.sides == ZERO
        assert pooled == pytest.approx(peak, abs=2)
    if method.is_fsdp:
        assert pooled > 1.01 * peak


def test_fsdp_gathers_most_before_its_first_block() -> None:
    """Root and first block, each whole and in its buffer; the reduce-scatter's largest input."""
    step = step_of(Job(model=zoo_model("opt-1.3b")), Method.FSDP, gpus=4)
    parts = parts_of(step.job, step.method, step.layout, step.gpu)
    found = answer(step.job, step.method, step.layout, step.gpu).pools
    edges, block = parts.counts.edges.base, parts.counts.blocks[0].base
    reduced = edges + parts.counts.edges.base_shard
    assert found.sides.fixed == pytest.approx(2 * (2 * (edges + block) + reduced))
