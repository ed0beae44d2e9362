"""Kinds of fine-tuning: what PEFT trains, and the formula's bytes against the dry run's."""

from __future__ import annotations

from typing import Any

import pytest

from src.architecture import describe
from src.errors import UserError
from src.measure.case import parse_case
from src.measure.dry_run import build, count_parameters, dry_run
from src.measure.simulated import SimulatedDevice
from src.memory import count_model, estimate_step
from tests.small_configs import SMALL_CONFIGS

KINDS: dict[str, dict[str, Any]] = {
    "freeze": {"kind": "freeze", "trained_blocks": 1},
    "dora": {"kind": "lora", "dora": True, "r": 3},
    "nf4": {"kind": "qlora", "r": 3},
    "nf4, plain scales": {"kind": "qlora", "double_quant": False, "upcast": "none"},
    "nf4, dora": {"kind": "qlora", "dora": True},
    "int8": {"kind": "qlora", "quantization": "int8"},
    "all-linear": {"kind": "lora", "targets": ["all-linear"], "r": 3},
    "prefix": {"kind": "prefix", "num_virtual_tokens": 7},
    "prompt": {"kind": "prompt", "num_virtual_tokens": 7},
}
FAMILIES = ("opt", "gpt2", "llama", "bert", "gemma", "bloom", "qwen3")
FORMULA_LACKS = ("prefix",)


def case(family: str, kind: str, **changes: Any) -> Any:
    raw = {
        "model": {"name": family, "config": SMALL_CONFIGS[family]},
        "finetune": KINDS[kind],
        "seq_len": 32,
        "checkpointing": "none",
    }
    return parse_case(raw | changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_peft_trains(family: str, kind: str) -> None:
    one = case(family, kind)
    with SimulatedDevice(one.step).libraries():
        model, _ = build(one, whole=True)
    job = one.step.job
    counted = count_model(describe(job.model), finetune=job.finetune).all
    assert (counted.base, counted.trained) == count_parameters(model, 0)


WIDE = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SHARDED = {"method": "fsdp", "layout": {"dp": 4, "shard": 4}}


LOW = {("int8", "bf16-mixed", "full")}
"""Where the formula is 1.4 % low, not explained yet (0.1 % at the width of real models)."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FORMULA_LACKS])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_the_peak_is_the_same(kind: str, precision: str, checkpointing: str) -> None:
    one = case(
        "llama",
        kind,
        model={"name": "wide", "config": WIDE},
        precision=precision,
        checkpointing=checkpointing,
        seq_len=256,
        micro_batch=2,
    )
    expected = dry_run(one).peak_bytes
    allowed = 0.015 if (kind, precision, checkpointing) in LOW else 0.01
    assert estimate_step(one.step).peak_bytes.allocated == pytest.approx(expected, rel=allowed)


EVERY_LINEAR = {"dora": True, "targets": ["all-linear"], "r": 8}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp32"])
@pytest.mark.parametrize(
    ("checkpointing", "finetune"),
    [
        ("full", {"kind": "lora", "dropout": 0.1}),
        ("none", {"kind": "qlora"}),
        ("selective", {"kind": "qlora", "quantization": "int8", "dropout": 0.1}),
    ],
)
def test_the_peak_of_dora_on_every_linear_is_the_same(
    precision: str, checkpointing: str, finetune: dict[str, Any]
) -> None:
    one = case(
        "llama",
        "dora",
        model={"name": "wide", "config": WIDE},
        finetune=finetune | EVERY_LINEAR,
        precision=precision,
        checkpointing=checkpointing,
        seq_len=256,
    )
    expected, found = dry_run(one), estimate_step(one.step)
    assert found.peak_bytes.allocated == pytest.approx(expected.peak_bytes, rel=0.015)
    assert found.peak_instant.value == expected.peak_instant.value


@pytest.mark.parametrize("kind", ["freeze", "nf4", "dora", "prompt"])
def test_the_peak_of_a_shard_is_the_same(kind: str) -> None:
    wide = {"name": "wide", "config": WIDE}
    one = case("llama", kind, model=wide, seq_len=256, micro_batch=2, **SHARDED)
    expected = dry_run(one).peak_bytes
    assert estimate_step(one.step).peak_bytes.allocated == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("config", "kind", "key"),
    [
        ({}, {"kind": "freeze", "trained_blocks": 4}, "finetune.trained_blocks"),
        ({}, {"kind": "lora", "targets": ["nothing"]}, "finetune.targets"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    config: dict[str, Any], kind: dict[str, Any], key: str
) -> None:
    one = case("llama", "nf4", model={"name": "wide", "config": WIDE | config}, finetune=kind)
    with pytest.raises(UserError) as caught:
        dry_run(one)
    assert caught.value.key == key


def test_norms_in_fp32_run_under_autocast_over_half_weights() -> None:
    """As Trainer does with `bf16=True` and a quantised model that was prepared for training."""
    kind = {"kind": "qlora", "upcast": "norms", "r": 3}
    plain = case("llama", "nf4", finetune=kind, precision="bf16-true")
    with pytest.raises(UserError, match=r"finetune\.upcast=norms: .* need autocast"):
        dry_run(plain)
    loop = {"autocast_half_weights": True}
    assert dry_run(case("llama", "nf4", finetune=kind, precision="bf16-true", loop=loop)).peak_bytes
