"""The largest micro batch, and what a verdict is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.plan import largest_micro_batch, verdict
from src.plan.search import LARGEST_MICRO_BATCH, with_micro_batch
from src.spec import Job, Step, Verdict
from tests.jobs import gpu, step_of, zoo_model
from tests.plan_requests import PerMethod, counting, estimate_of

CAPACITY = gpu().usable_bytes
STEP = step_of(Job(model=zoo_model("opt-125m")))


@pytest.mark.parametrize(
    ("peak", "upper", "expected"),
    [
        (0, 0, Verdict.FITS),
        (CAPACITY - 1, CAPACITY, Verdict.FITS),
        (CAPACITY, CAPACITY + 1, Verdict.TIGHT),
        (CAPACITY, 10 * CAPACITY, Verdict.TIGHT),
        (CAPACITY + 1, CAPACITY + 1, Verdict.OOM),
    ],
)
def test_a_verdict_compares_device_bytes_with_what_is_usable(
    peak: int, upper: int, expected: Verdict
) -> None:
    assert verdict(estimate_of(peak, upper), gpu()) is expected


@given(largest=st.integers(0, 5000))
def test_any_largest_is_found_and_in_few_estimates(largest: int) -> None:
    asked: list[int] = []

    def estimator(step: Step):
        asked.append(step.micro_batch)
        return counting(lambda batch: CAPACITY if batch <= largest else CAPACITY + 1)(step)

    assert largest_micro_batch(STEP, estimator) == largest
    assert len(asked) <= 2 * math.log2(max(largest, 1)) + 3


@given(steps=st.lists(st.integers(0, CAPACITY // 10), min_size=30, max_size=30))
def test_any_rising_peak_is_searched_as_if_counted_up(steps: list[int]) -> None:
    peaks = [sum(steps[:count]) for count in range(1, 31)]

    def needs(batch: int) -> float:
        return peaks[batch - 1] if batch <= 30 else 2 * CAPACITY

    counted = sum(peak <= CAPACITY for peak in peaks)
    assert largest_micro_batch(STEP, counting(needs)) == counted


def test_a_search_ends_where_nothing_grows() -> None:
    assert largest_micro_batch(STEP, PerMethod(otherwise=1.0)) >= LARGEST_MICRO_BATCH


def test_tight_is_not_enough() -> None:
    estimator = PerMethod(otherwise=40.0, slope=1.0, margin=1.1)
    found = largest_micro_batch(STEP, estimator)
    assert found == int(gpu().usable_gib / 1.1 - 40)
    assert verdict(estimator(with_micro_batch(STEP, found + 1)), gpu()) is Verdict.TIGHT


def test_the_micro_batch_of_the_step_does_not_matter() -> None:
    estimator = PerMethod(otherwise=10.0, slope=1.0)
    found = {
        largest_micro_batch(with_micro_batch(STEP, batch), estimator) for batch in (1, 7, 1000)
    }
    assert len(found) == 1
