"""Models that keep parameters in fp32, and FSDP, which takes one dtype a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from src.architecture import describe
from src.config import zoo
from src.errors import NotCoveredError
from src.measure.case import Case, parse_case
from src.measure.dry_run import build, dry_run
from src.memory import estimate_step
from tests.small_configs import SMALL_CONFIGS

DEEPSEEK = SMALL_CONFIGS["deepseek_v2"]
LINE = (
    "precision=bf16-true: FSDP shards units of one dtype and deepseek_v2 keeps mlp.gate.weight in "
    "fp32; precision=bf16-mixed or fp32, or a method without FSDP"
)
SHARDED = {"method": "fsdp", "layout": {"dp": 2, "shard": 2}}
RUNS: list[dict[str, Any]] = [
    {"method": "fsdp", "precision": "bf16-mixed"},
    {"method": "fsdp", "precision": "fp32"},
    {"method": "fsdp", "finetune": {"kind": "lora"}},
    {"method": "ddp", "layout": {"dp": 2}},
    {"method": "single", "layout": {}},
]


def case_of(config: dict[str, Any], **changes: Any) -> Case:
    model = {"name": "some", "config": config}
    case = {"model": model, "attention": "eager", "seq_len": 16, "precision": "bf16-true"}
    return parse_case({**case, **changes})


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_the_description_knows_what_stays_fp32(name: str) -> None:
    case = case_of(SMALL_CONFIGS[name])
    model, _ = build(case, whole=True)
    kept = [name for name, tensor in model.named_parameters() if tensor.dtype == torch.float32]
    decoder = describe(case.step.job.model)
    told = [
        parameter.name
        for parameter in decoder.named_parameters()
        if parameter.name.endswith(decoder.fp32_parameters or ("nothing",))
    ]
    assert kept == told


@pytest.mark.parametrize("method", ["fsdp", "fsdp-grad"])
def test_both_refuse_it_in_the_same_line(method: str) -> None:
    case = case_of(DEEPSEEK, **{**SHARDED, "method": method})
    for answer in (lambda: dry_run(case), lambda: estimate_step(case.step)):
        with pytest.raises(NotCoveredError) as caught:
            answer()
        assert str(caught.value) == LINE


@pytest.mark.parametrize("finetune", ["full", "lora"])
def test_fsdp1_flattens_frozen_parameters_too(finetune: str) -> None:
    case = case_of(DEEPSEEK, **SHARDED, finetune={"kind": finetune}, loop={"fsdp1": True})
    with pytest.raises(NotCoveredError) as caught:
        dry_run(case)
    assert str(caught.value) == LINE


@pytest.mark.parametrize("changes", RUNS, ids=str)
def test_one_dtype_runs(changes: dict[str, Any]) -> None:
    case = case_of(DEEPSEEK, **{**SHARDED, **changes})
    assert dry_run(case).peak_bytes > 0
    assert estimate_step(case.step).peak_bytes.allocated > 0


def test_the_zoo_keeps_nothing_else_in_fp32() -> None:
    kept = set()
    for name in zoo.index("model"):
        config = zoo.load("model", name)["config"]
        if describe(case_of(config).step.job.model).fp32_parameters:
            kept.add(name)
    assert kept == {"deepseek-v2-lite"}
