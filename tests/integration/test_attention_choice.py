"""Formula and dry run take the same attention for every family, and refuse the same."""

from __future__ import annotations

from typing import Any

import pytest

from src.architecture import describe
from src.errors import UserError
from src.measure.assumptions import eager_instead
from src.measure.case import Case, parse_case
from src.measure.dry_run import build
from src.measure.simulated import SimulatedDevice
from src.memory import implementation
from src.spec import Attention
from tests.small_configs import SMALL_CONFIGS

NAMES = {"flash_attention_2": Attention.FLASH, "sdpa": Attention.SDPA, "eager": Attention.EAGER}


def case_of(name: str, attention: Attention) -> Case:
    model = {"name": name, "config": SMALL_CONFIGS[name]}
    return parse_case({"model": model, "attention": attention.value, "seq_len": 16})


def built(case: Case) -> Any:
    with SimulatedDevice(case.step).libraries():
        model, _ = build(case, whole=True)
    return model


def refused(error: UserError, case: Case) -> None:
    assert (error.key, str(error.value)) == ("attention", case.step.job.attention.value)


def of_dry_run(case: Case) -> Attention | None:
    """What transformers builds the model with; None where it is refused."""
    try:
        return NAMES[built(case).config._attn_implementation]
    except UserError as error:
        return refused(error, case)


def of_formula(case: Case) -> Attention | None:
    job = case.step.job
    try:
        return implementation(describe(job.model), job)
    except UserError as error:
        return refused(error, case)


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_both_take_or_refuse_the_same(name: str, attention: Attention) -> None:
    case = case_of(name, attention)
    assert of_dry_run(case) is of_formula(case)


def test_attention_with_sinks_trains_eagerly() -> None:
    assert of_dry_run(case_of("gpt_oss", Attention.FLASH)) is None
    assert of_dry_run(case_of("gpt_oss", Attention.SDPA)) is Attention.EAGER


@pytest.mark.parametrize(
    ("name", "attention", "is_said"),
    [
        ("bloom", Attention.SDPA, True),
        ("bloom", Attention.EAGER, False),
        ("llama", Attention.SDPA, False),
    ],
)
def test_eager_attention_that_nobody_asked_for_is_said(
    name: str, attention: Attention, is_said: bool
) -> None:
    case = case_of(name, attention)
    notes = eager_instead(case, built(case))
    assert [f"for {name}: it runs eager" in note for note in notes] == [True] * is_said
