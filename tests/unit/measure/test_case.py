"""JSON cases: defaults, choices, and one clear line for everything that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import UserError
from src.measure.assumptions import assumptions, num_experts
from src.measure.case import A100_80GB, parse_case
from src.spec import Attention, FinetuneKind, Method, Precision

MODEL = {"config": {"model_type": "llama"}}


def test_everything_but_the_model_has_a_default() -> None:
    case = parse_case({"model": MODEL})
    assert case.step.gpu == A100_80GB
    assert case.step.method is Method.SINGLE
    assert case.step.micro_batch == 1
    assert case.step.job.precision is Precision.BF16_MIXED
    assert case.loop.max_grad_norm == 1.0


def test_every_key_is_read() -> None:
    case = parse_case(
        {
            "model": MODEL,
            "finetune": {"kind": "lora", "r": 8, "targets": ["q_proj"]},
            "attention": "eager",
            "gpu": {"compute_capability": [7, 0], "usable_gib": 15.77},
            "layout": {"dp": 4, "shard": 2},
            "loop": {"hold_outputs": True},
        }
    )
    assert case.step.job.finetune.kind is FinetuneKind.LORA
    assert case.step.job.finetune.targets == ("q_proj",)
    assert case.step.job.attention is Attention.EAGER
    assert case.step.gpu.compute_capability == (7, 0)
    assert case.step.layout.shard == 2
    assert case.loop.hold_outputs


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ([], "case"),
        ({"model": MODEL, "modle": 1}, "case"),
        ({"model": 3}, "model"),
        ({"model": {"config": {}}}, "model_type"),
        ({"model": MODEL, "precision": "bf17"}, "precision"),
        ({"model": MODEL, "micro_batch": "4"}, "micro_batch"),
        ({"model": MODEL, "seq_len": 0}, "seq_len"),
        ({"model": MODEL, "loop": {"hold": True}}, "loop.hold"),
        ({"model": MODEL, "layout": {"pp": 2}}, "layout.pp"),
    ],
)
def test_what_is_wrong_is_named(raw: Any, key: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_case(raw)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_assumptions_are_told_where_they_bear() -> None:
    assert not any("expert" in note for note in assumptions(parse_case({"model": MODEL})))
    mixture = {"config": {"model_type": "mixtral", "num_local_experts": 8}}
    assert any("expert" in note for note in assumptions(parse_case({"model": mixture})))
    assert num_experts({"n_routed_experts": 64}) == 64
    assert num_experts({}) == 0
