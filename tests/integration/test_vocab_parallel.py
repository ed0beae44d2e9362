"""Embedding and head split along the vocabulary: PyTorch's own plans on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import NotCoveredError, UserError
from src.measure.case import Case, parse_case
from src.measure.dry_run import build, dry_run
from src.measure.events import Instant
from src.measure.simulated import SimulatedDevice
from src.memory import estimate_step
from tests.small_configs import SMALL_CONFIGS

TP = {"method": "tp", "layout": {"tp": 2}}
SHARDED = {"method": "fsdp+tp", "layout": {"dp": 2, "shard": 2, "tp": 2}}
REPLICATED = {"method": "ddp+tp", "layout": {"dp": 2, "tp": 2}}
ROWS, TOKENS = 2**14, 64
STATES = 2


def case_of(name: str, **settings: Any) -> Case:
    """A small model with a large vocabulary."""
    return parse_case(
        {
            "model": {"name": name, "config": {**SMALL_CONFIGS[name], "vocab_size": ROWS}},
            "vocab_parallel": True,
            "micro_batch": 2,
            "seq_len": TOKENS // 2,
            **settings,
        }
    )


@pytest.mark.parametrize("layout", [TP, SHARDED, REPLICATED], ids=["tp", "fsdp+tp", "ddp+tp"])
@pytest.mark.parametrize(("name", "tables"), [("llama", 2), ("opt", 1), ("gpt2", 1)])
def test_half_of_each_table_and_of_its_states_is_left(
    name: str, tables: int, layout: dict[str, Any]
) -> None:
    """Two GPUs of the group: of fp32 weights, states, gradients and DDP's buckets, tied or not."""
    split, whole = (
        dry_run(case_of(name, **layout, vocab_parallel=on)).instant_peaks for on in (True, False)
    )
    width = case_of(name).step.job.model.config.get("hidden_size") or SMALL_CONFIGS[name]["n_embd"]
    half = tables * ROWS * width * 4 // 2 // layout["layout"].get("shard", 1)
    buckets = int(layout is REPLICATED)
    loaded = whole[Instant.LOAD] - split[Instant.LOAD]
    assert loaded == pytest.approx((1 + buckets) * half, rel=0.02)
    saved = whole[Instant.OPTIMIZER_STEP] - split[Instant.OPTIMIZER_STEP]
    assert saved == pytest.approx((1 + STATES + 1 + buckets) * half, rel=0.05)


def test_every_gpu_has_all_logits() -> None:
    logits = 10 * TOKENS * ROWS
    peaks = dry_run(case_of("llama", **TP)).instant_peaks
    assert peaks[Instant.FORWARD_END] > logits


@pytest.mark.parametrize("name", ["opt", "bert", "llama"])
def test_what_was_tied_is_one_parameter_still(name: str) -> None:
    counts = []
    for on in (True, False):
        case = case_of(name, **TP, vocab_parallel=on)
        with SimulatedDevice(case.step).libraries():
            model, _ = build(case, whole=True)
        counts.append(len(list(model.parameters())))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama", {**TP, "loss": "chunked"}, "or loss=standard"),
        ("llama", {**TP, "sequence_parallel": True}, "sequence_parallel=false"),
        ("gemma3_text", TP, "the embedding of gemma3_text scales"),
    ],
)
def test_what_cannot_be_split_is_one_line(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"vocab_parallel=true: .*{said}"):
        dry_run(case_of(name, **settings))


def test_an_odd_vocabulary_is_not_split() -> None:
    odd = {"name": "llama", "config": {**SMALL_CONFIGS["llama"], "vocab_size": 513}}
    with pytest.raises(UserError, match="degree 2 does not divide 513 rows"):
        dry_run(case_of("llama", **TP, model=odd))


def test_the_formula_leaves_it_to_the_dry_run() -> None:
    with pytest.raises(NotCoveredError, match="vocab_parallel=true"):
        estimate_step(case_of("llama", **TP).step)
