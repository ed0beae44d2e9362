"""Sequence parallelism: PyTorch's own plans on fake tensors against the formula."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import UserError
from src.measure.case import Case, parse_case
from src.measure.dry_run import dry_run
from src.memory import estimate_step
from tests.small_configs import SMALL_CONFIGS

TP = {"method": "tp", "layout": {"tp": 2}}
SHARDED = {"method": "fsdp+tp", "layout": {"dp": 2, "shard": 2, "tp": 2}}
ALL_LINEAR = {"kind": "lora", "targets": ["all-linear"], "dropout": 0.1}
ROUNDING = 512
"""Bytes that the allocator may add to a tensor, and that the formula leaves out."""


def case_of(name: str, **settings: Any) -> Case:
    """A small model, its sequence split."""
    return parse_case(
        {
            "model": {"name": name, "config": {**SMALL_CONFIGS[name], "vocab_size": 512}},
            "sequence_parallel": True,
            "micro_batch": 8,
            "seq_len": 32,
            **settings,
        }
    )


def sizes(name: str, **settings: Any) -> tuple[int, int, int]:
    """The peak of the formula, of the dry run, and how far rounding may take them apart."""
    case = case_of(name, **settings)
    simulated = dry_run(case)
    blocks = 100 + 20 * len(simulated.ledger)
    return estimate_step(case.step).peak_bytes.allocated, simulated.peak_bytes, blocks * ROUNDING


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("opt", TP),
        ("llama", {**TP, "checkpointing": "none", "precision": "bf16-true"}),
        ("llama", SHARDED),
        ("gpt2", {**TP, "precision": "fp32", "checkpointing": "none"}),
        ("bert", TP),
        ("olmo2", TP),
        ("llama", {**TP, "finetune": ALL_LINEAR, "checkpointing": "none"}),
        ("opt", {**TP, "finetune": ALL_LINEAR}),
    ],
)
def test_both_give_the_same_peak(name: str, settings: dict[str, Any]) -> None:
    formula, simulated, rounding = sizes(name, **settings)
    assert abs(formula - simulated) <= rounding


def test_it_saves_what_norms_and_dropouts_keep() -> None:
    _, split, _ = sizes("opt", **TP, checkpointing="none")
    _, whole, _ = sizes("opt", **TP, checkpointing="none", sequence_parallel=False)
    assert split < whole


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_adapters_are_split_as_peft_splits_them(name: str) -> None:
    settings = {**TP, "finetune": ALL_LINEAR, "checkpointing": "none", "sequence_parallel": False}
    formula, simulated, rounding = sizes(name, **settings)
    assert abs(formula - simulated) <= rounding


def test_adapters_that_stay_whole_do_not_go_with_a_split_sequence() -> None:
    line = "sequence_parallel=true: false with LoRA: olmo2 gathers what its adapted"
    case = case_of("olmo2", **TP, finetune=ALL_LINEAR)
    for answer in (lambda: estimate_step(case.step), lambda: dry_run(case)):
        with pytest.raises(UserError, match=line):
            answer()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_experts_are_split_as_transformers_splits_them(name: str, checkpointing: str) -> None:
    settings = {**TP, "checkpointing": checkpointing, "sequence_parallel": False}
    formula, simulated, rounding = sizes(name, **settings)
    assert abs(formula - simulated) <= rounding


def test_experts_do_not_go_with_a_split_sequence() -> None:
    case = case_of("mixtral", **TP)
    for answer in (lambda: estimate_step(case.step), lambda: dry_run(case)):
        with pytest.raises(UserError, match="sequence_parallel=true: false: there is no plan"):
            answer()


def test_the_group_has_to_divide_the_sequence() -> None:
    with pytest.raises(UserError, match="seq_len=31: a multiple of"):
        sizes("opt", **TP, seq_len=31)
