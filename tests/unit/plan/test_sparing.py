"""The frugal search against estimators whose answer is known."""

from __future__ import annotations

import pytest

from src.errors import UserError
from src.measure.case import A100_80GB
from src.memory import Estimate
from src.memory.levels import UPPER_SLACK_AT_CAPACITY
from src.memory.terms import Instant
from src.plan.sparing import MOST_TRIALS, MOST_TRIALS_BESIDE, largest_sparingly
from src.spec import Job, Layout, Method, Model, Step
from src.units import GIB, Levels

STEP = Step(
    job=Job(model=Model(name="tiny", hf_id=None, config={"model_type": "gpt2"})),
    method=Method.SINGLE,
    layout=Layout(),
    gpu=A100_80GB,
    micro_batch=1,
)
AT_CAPACITY = 1 + UPPER_SLACK_AT_CAPACITY


class Linear:
    """Needs `base` and `slope` GiB per sequence; beyond `limit` fragmentation is in the way."""

    def __init__(self, base: float, slope: float, limit: int = 1 << 30) -> None:
        self.base, self.slope, self.limit = base, slope, limit
        self.asked: list[int] = []

    def __call__(self, step: Step) -> Estimate:
        self.asked.append(step.micro_batch)
        needed = self.base + self.slope * step.micro_batch
        allocated = round(needed * GIB)
        factor = 1.25 if step.micro_batch > self.limit else AT_CAPACITY
        device = round(factor * needed * GIB)
        levels = Levels(allocated=allocated, reserved=device, device=device)
        return Estimate(
            peak_bytes=levels, upper_bytes=levels, peak_instant=Instant.FORWARD_END, ledger={}
        )

    def largest(self) -> int:
        return int((A100_80GB.usable_gib / AT_CAPACITY - self.base) // self.slope)


@pytest.mark.parametrize("slope", [0.1, 0.37, 2.0, 11.0])
@pytest.mark.parametrize("error", [0.97, 1.0, 1.04])
def test_a_good_guide_needs_few_trials(slope: float, error: float) -> None:
    truth = Linear(5, slope)
    found = largest_sparingly(STEP, truth, Linear(5, slope * error))
    assert len(truth.asked) <= MOST_TRIALS
    assert found.micro_batch <= truth.largest()
    assert found.micro_batch >= 0.95 * truth.largest() - 1
    if error == 1.0:
        assert found.is_exact
        assert found.micro_batch == truth.largest()


def test_without_a_guide() -> None:
    truth = Linear(5, 0.37)
    found = largest_sparingly(STEP, truth, None)
    assert (len(truth.asked), found.micro_batch) == (MOST_TRIALS, truth.largest())


@pytest.mark.parametrize("asked", [1, 2, 50, 500])
def test_the_micro_batch_asked_for_counts_as_a_trial(asked: int) -> None:
    truth = Linear(5, 0.37)
    found = largest_sparingly(STEP, truth, Linear(5, 0.37), asked=asked)
    assert truth.asked[0] == asked
    assert len(truth.asked) <= 1 + MOST_TRIALS_BESIDE
    assert 0.9 * truth.largest() <= found.micro_batch <= truth.largest()


def test_fragmentation_that_the_guide_does_not_know_is_stepped_over() -> None:
    truth = Linear(5, 0.37, limit=180)
    found = largest_sparingly(STEP, truth, Linear(5, 0.37))
    assert len(truth.asked) <= MOST_TRIALS
    assert 150 <= found.micro_batch <= 180
    assert found.unfit is not None
    assert found.unfit > 180


def test_nothing_fits() -> None:
    truth = Linear(100, 1)
    found = largest_sparingly(STEP, truth, Linear(100, 1))
    assert (found.micro_batch, found.unfit, truth.asked) == (0, 1, [1])


def test_micro_batch_1_is_tried_before_giving_up() -> None:
    truth = Linear(5, 40)
    found = largest_sparingly(STEP, truth, Linear(5, 0.001))
    assert 1 in truth.asked
    assert found.micro_batch == 1


def test_a_guide_that_refuses_is_done_without() -> None:
    def refuses(_: Step) -> Estimate:
        raise UserError(key="attention", value="flash", allowed="no")

    truth = Linear(5, 0.37)
    assert largest_sparingly(STEP, truth, refuses).micro_batch == truth.largest()
