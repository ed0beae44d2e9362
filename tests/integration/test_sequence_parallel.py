"""Sequence parallelism: PyTorch's own plans on fake tensors against the formula."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.dry_run import dry_run
from src.memory import estimate_step
from tests.small_configs import SMALL_CONFIGS

TP = {"method": "tp", "layout": {"tp": 2}}
SHARDED = {"method": "fsdp+tp", "layout": {"dp": 2, "shard": 2, "tp": 2}}
ROUNDING = 512
"""Bytes that the allocator may add to a tensor, and that the formula leaves out."""


def sizes(name: str, **settings: Any) -> tuple[int, int, int]:
    """The peak of the formula, of the dry run, and how far rounding may take them apart."""
    case = parse_case(
        {
            "model": {"name": name, "config": {**SMALL_CONFIGS[name], "vocab_size": 512}},
            "sequence_parallel": True,
            "micro_batch": 8,
            "seq_len": 32,
            **settings,
        }
    )
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
    ],
)
def test_both_give_the_same_peak(name: str, settings: dict[str, Any]) -> None:
    formula, simulated, rounding = sizes(name, **settings)
    assert abs(formula - simulated) <= rounding


def test_it_saves_what_norms_and_dropouts_keep() -> None:
    _, split, _ = sizes("opt", **TP, checkpointing="none")
    _, whole, _ = sizes("opt", **TP, checkpointing="none", sequence_parallel=False)
    assert split < whole


def test_the_group_has_to_divide_the_sequence() -> None:
    with pytest.raises(UserError, match="seq_len=31: a multiple of"):
        sizes("opt", **TP, seq_len=31)
