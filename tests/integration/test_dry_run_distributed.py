"""The dry run's distributed methods and its extension by depth, against exact expectations."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.dry_run import dry_run
from src.measure.events import Instant, Owner
from src.measure.result import DryRunResult

TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EMBEDDINGS = 1024 * 256
LINEARS = 4 * 256 * 256 + 3 * 256 * 512
NORMS = 6 * 2 * 256 + 256
PARAMETERS = 2 * EMBEDDINGS + 6 * LINEARS + NORMS
FSDP4 = {"method": "fsdp", "layout": {"dp": 4, "shard": 4}}


def run(*, whole: bool = False, **changes: Any) -> DryRunResult:
    case = {
        "model": {"name": "tiny", "config": TINY},
        "seq_len": 128,
        "micro_batch": 2,
        "precision": "bf16-true",
    }
    return _run(json.dumps(case | changes, sort_keys=True), whole)


@functools.cache
def _run(case: str, whole: bool) -> DryRunResult:
    return dry_run(parse_case(json.loads(case)), whole=whole)


def test_fsdp_shards_states_and_gathers_weights() -> None:
    column = run(**FSDP4).ledger[Instant.OPTIMIZER_STEP]
    assert column[Owner.GRADIENTS] == pytest.approx(PARAMETERS * 2 / 4, rel=0.001)
    assert column[Owner.OPTIMIZER_STATES] == pytest.approx(PARAMETERS * 4 / 4, rel=0.03)
    assert Owner.GATHERED_WEIGHTS not in column
    forward = run(**FSDP4).ledger[Instant.FORWARD_END]
    assert forward[Owner.GATHERED_WEIGHTS] >= 2 * EMBEDDINGS * 2


def test_fsdp_grad_keeps_gathered_weights_until_backward() -> None:
    held = run(**FSDP4 | {"method": "fsdp-grad"}).ledger[Instant.FORWARD_END]
    assert held[Owner.GATHERED_WEIGHTS] == PARAMETERS * 2


def test_ddp_adds_one_gradient_sized_buffer() -> None:
    single, ddp = run(), run(method="ddp", layout={"dp": 4})
    assert ddp.after_step_bytes - single.after_step_bytes == PARAMETERS * 2


def test_tensor_parallelism_splits_the_linears_of_the_blocks_only() -> None:
    column = run(method="tp", layout={"tp": 2}).ledger[Instant.OPTIMIZER_STEP]
    expected = 2 * EMBEDDINGS + NORMS + 6 * LINEARS // 2
    assert column[Owner.GRADIENTS] == expected * 2


def test_more_shards_never_take_more() -> None:
    peaks = [
        run(method="fsdp", layout={"dp": size, "shard": size}).peak_bytes for size in (2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_accum": 2, "optimizer": "sgd-momentum", "method": "ddp", "layout": {"dp": 2}},
        FSDP4,
        FSDP4 | {"loop": {"fsdp1": True}, "finetune": {"kind": "lora"}},
        {"method": "tp", "layout": {"tp": 2}},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"precision": "bf16-mixed", "checkpointing": "none", "optimizer": "adamw"},
                {"finetune": {"kind": "lora"}, "loop": {"reentrant_checkpointing": True}},
                FSDP4 | {"method": "fsdp-grad", "precision": "bf16-mixed"},
                {"method": "fsdp+tp", "layout": {"dp": 4, "shard": 4, "tp": 2}},
            )
        ),
    ],
)
def test_five_blocks_extended_equal_the_whole_model(changes: dict[str, Any]) -> None:
    short, whole = run(**changes), run(whole=True, **changes)
    assert short.ledger == whole.ledger
    assert short.instant_peaks == whole.instant_peaks
    assert short.after_step_bytes == whole.after_step_bytes
    assert short.peak_instant == whole.peak_instant


def test_the_gathers_run_on_streams_of_their_own() -> None:
    streams = {event.stream for event in run(**FSDP4).events}
    assert 0 in streams
    assert len(streams) >= 3


def test_reserved_bytes_cover_allocated_ones_and_device_bytes_cover_both() -> None:
    result = run()
    found = result.reservation
    assert found is not None
    assert found.oom is None
    assert result.peak_bytes <= found.reserved_bytes < found.device_bytes


def test_what_does_not_fit_is_an_outcome() -> None:
    result = run(gpu={"usable_gib": 0.52})
    assert result.outcome == "oom"
    assert result.to_json()["outcome"] == "oom"
    found = result.reservation
    assert found is not None
    assert found.oom is not None
    assert "CUDA out of memory" in found.oom.message()
    assert result.peak_bytes == run().peak_bytes


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [
        ({}, 0.5 + 1 / 64 + 4 / 64 / 256),
        ({"double_quant": False}, 0.5 + 4 / 64),
        ({"quantization": "int8"}, 1),
    ],
)
def test_quantised_linears_are_stored_in_half_a_byte_or_one(
    options: dict[str, Any], bytes_per_weight: float
) -> None:
    dense = run(finetune={"kind": "lora"}).ledger[Instant.LOAD][Owner.WEIGHTS]
    finetune = {"kind": "qlora", "upcast": "none", **options}
    packed = run(finetune=finetune).ledger[Instant.LOAD][Owner.WEIGHTS]
    assert dense - packed == pytest.approx(6 * LINEARS * (2 - bytes_per_weight), rel=0.02)


@pytest.mark.parametrize(
    ("config", "key"),
    [({"num_key_value_heads": 1}, "tp"), ({"num_attention_heads": 4, "hidden_size": 256}, "tp")],
)
def test_a_degree_that_divides_nothing_is_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        run(model={"config": TINY | config}, method="tp", layout={"tp": 3})
    assert caught.value.key == key
