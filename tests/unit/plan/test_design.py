"""A campaign's design: spread evenly, filled as asked, the same each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from src.config.gpu import load_gpu
from src.config.model import resolve_model
from src.errors import UserError
from src.memory import estimate_step
from src.plan.design import BEYOND, Design, PlannedStep, halton, plan_steps
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Method,
    Model,
    Optimizer,
    Precision,
    Step,
)

GPU = load_gpu("a100-80gb")


def model(name: str) -> Model:
    return resolve_model(name, arch={}, trust_remote_code=False)[0]


DESIGN = Design(
    models=tuple(map(model, ["opt-125m", "opt-350m", "gpt2", "pythia-160m", "llama-3.2-1b"])),
    methods=(Method.SINGLE, Method.DDP, Method.FSDP, Method.TP),
    num_gpus=(1, 2, 4),
    finetunes=(Finetune(), Finetune(kind=FinetuneKind.LORA)),
    precisions=(Precision.BF16_MIXED, Precision.FP32),
    optimizers=(Optimizer.ADAMW_FUSED, Optimizer.SGD),
    checkpointings=(Checkpointing.FULL, Checkpointing.NONE),
    attentions=(Attention.SDPA, Attention.EAGER),
    seq_lens=(256, 512, 4096),
    fill=(0.2, 0.95),
    beyond=0.1,
    num_steps=64,
)


def plan(can_run: Callable[[Step], bool] = lambda _: True, **changes: object) -> list[PlannedStep]:
    return list(plan_steps(replace(DESIGN, **changes), GPU, can_run=can_run))  # type: ignore[arg-type]


def test_every_step_fills_the_card_as_asked_or_is_meant_to_pass_it() -> None:
    steps = plan()
    within = [step for step in steps if 0.2 <= step.fill <= 0.95]
    beyond = [step for step in steps if BEYOND[0] <= step.fill <= BEYOND[1]]
    assert len(within) + len(beyond) == len(steps) == 64
    assert 2 <= len(beyond) <= 14
    for planned in steps:
        assert planned.device_bytes == estimate_step(planned.step).peak_bytes.device
    bins = Counter(int((step.fill - 0.2) / 0.15) for step in within)
    assert min(bins[index] for index in range(5)) >= 3, "no part of the range is left out"


def test_every_choice_is_made_about_equally_often() -> None:
    steps = [planned.step for planned in plan()]
    halves: list[Callable[[Step], object]] = [
        lambda step: step.job.precision,
        lambda step: step.job.optimizer,
        lambda step: step.job.checkpointing,
        lambda step: step.job.attention,
    ]
    for choice in halves:
        counts = Counter(map(choice, steps))
        assert len(counts) == 2
        assert min(counts.values()) >= len(steps) / 4
    families = Counter(step.job.model.model_type for step in steps)
    assert set(families) == {"opt", "gpt2", "gpt_neox", "llama"}
    assert min(families.values()) >= len(steps) / 10
    assert {step.method for step in steps} == set(DESIGN.methods)


def test_only_layouts_that_belong_to_the_method_are_planned() -> None:
    for planned in plan():
        layout = planned.step.layout
        assert (layout.num_gpus == 1) is (planned.step.method is Method.SINGLE)


def test_what_the_device_does_not_run_is_not_planned() -> None:
    steps = plan(lambda step: not step.job.finetune.is_lora, num_steps=20)
    assert not [planned for planned in steps if planned.step.job.finetune.is_lora]


def test_a_length_that_a_model_has_no_positions_for_is_not_planned() -> None:
    steps = plan()
    assert {
        planned.step.job.model.name for planned in steps if planned.step.job.seq_len == 4096
    } == {"llama-3.2-1b"}


def test_a_plan_is_repeatable_and_longer_ones_begin_with_it() -> None:
    assert plan() == plan()
    assert plan()[:10] == plan(num_steps=10)
    assert plan(seed=1) != plan()


def test_too_many_steps_for_a_small_design_are_refused() -> None:
    with pytest.raises(UserError, match=r"campaign\.num_cases=20: at most 0: no more steps"):
        plan(models=(model("llama-3.1-405b"),), num_steps=20)


def test_points_are_spread_in_every_coordinate() -> None:
    points = list(islice(halton(3), 200))
    for coordinate in zip(*points, strict=True):
        assert all(0 <= value < 1 for value in coordinate)
        assert len(set(coordinate)) == 200
        bins = Counter(int(10 * value) for value in coordinate)
        assert min(bins.values()) >= 12
        assert max(bins.values()) <= 28
