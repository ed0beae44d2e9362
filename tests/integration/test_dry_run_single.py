"""One training step on a simulated GPU, checked against bytes that are known exactly."""

from __future__ import annotations

import json
import subprocess
import sys
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
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EMBEDDINGS = 1024 * 256
BLOCK = 256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512 + 2 * 256
PARAMETERS = 2 * EMBEDDINGS + 3 * BLOCK + 256


def tiny_case(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"name": "tiny", "config": TINY},
        "seq_len": 128,
        "micro_batch": 2,
        "precision": "bf16-true",
        "optimizer": "adamw",
    } | changes


def run(**changes: Any) -> DryRunResult:
    return dry_run(parse_case(tiny_case(**changes)))


@pytest.mark.parametrize(("precision", "weight_bytes"), [("bf16-true", 2), ("fp32", 4)])
def test_static_terms_are_counted_exactly(precision: str, weight_bytes: int) -> None:
    result = run(precision=precision)
    column = result.ledger[Instant.OPTIMIZER_STEP]
    assert column[Owner.GRADIENTS] == PARAMETERS * weight_bytes
    assert column[Owner.OPTIMIZER_STATES] == 2 * PARAMETERS * weight_bytes
    inverse_frequencies = 512
    assert column[Owner.WEIGHTS] - column[Owner.GRADIENTS] in (
        inverse_frequencies,
        2 * inverse_frequencies,
    )


def test_foreach_adamw_takes_one_more_copy_than_fused() -> None:
    foreach = run(optimizer="adamw").ledger[Instant.OPTIMIZER_STEP]
    fused = run(optimizer="adamw-fused").ledger[Instant.OPTIMIZER_STEP]
    decayed = PARAMETERS - 7 * 256
    assert foreach[Owner.TEMPORARIES] == decayed * 2
    assert fused.get(Owner.TEMPORARIES, 0) <= 1024


def test_sgd_keeps_no_states() -> None:
    assert Owner.OPTIMIZER_STATES not in run(optimizer="sgd").ledger[Instant.OPTIMIZER_STEP]
    momentum = run(optimizer="sgd-momentum").ledger[Instant.OPTIMIZER_STEP]
    assert momentum[Owner.OPTIMIZER_STATES] == PARAMETERS * 2


def test_two_runs_give_the_same_bytes() -> None:
    first, second = run(), run()
    assert first.events == second.events
    assert first.peak_bytes == second.peak_bytes


def test_the_columns_sum_to_the_peaks() -> None:
    result = run(precision="bf16-mixed", checkpointing="none")
    for instant, column in result.ledger.items():
        assert sum(column.values()) == result.instant_peaks[instant]
    assert result.peak_bytes == result.instant_peaks[result.peak_instant]
    assert result.source == "simulated"


def test_checkpointing_keeps_one_input_per_block() -> None:
    kept = run(checkpointing="full").ledger[Instant.FORWARD_END][Owner.SAVED_ACTIVATIONS]
    everything = run(checkpointing="none").ledger[Instant.FORWARD_END][Owner.SAVED_ACTIVATIONS]
    block_input = 2 * 128 * 256 * 2
    assert 3 * block_input <= kept < 8 * block_input
    assert everything > 3 * kept


def test_every_recorded_block_is_freed_or_lives_on() -> None:
    result = run()
    live: dict[int, int] = {}
    for event in result.events:
        if event.num_bytes:
            assert event.block not in live
            live[event.block] = -(-event.num_bytes // 512) * 512
        else:
            del live[event.block]
    assert sum(live.values()) == result.after_step_bytes


@pytest.mark.parametrize("attention", ["flash", "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_every_attention_runs(attention: str, kind: str, precision: str) -> None:
    result = run(attention=attention, finetune={"kind": kind}, precision=precision)
    assert result.peak_bytes > 0


def test_outputs_held_through_backward_keep_the_logits() -> None:
    dropped = run(precision="bf16-mixed").instant_peaks[Instant.LOSS_BACKWARD]
    held = run(precision="bf16-mixed", loop={"hold_outputs": True})
    assert held.instant_peaks[Instant.LOSS_BACKWARD] - dropped >= 2 * 128 * 1024 * 4


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "zero2"}, "method"),
        ({"attention": "flash", "precision": "fp32"}, "attention"),
        ({"attention": "flash", "gpu": {"compute_capability": [7, 0]}}, "attention"),
        ({"model": {"config": {"model_type": "no-such-model"}}}, "model_type"),
        ({"finetune": {"kind": "lora", "targets": ["nothing"]}}, "finetune.targets"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        run(**changes)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def worker(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "src.measure.worker"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_worker_answers_one_row() -> None:
    done = worker(json.dumps(tiny_case()))
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["source"] == "simulated"
    assert row["peak_bytes"] == run().peak_bytes


@pytest.mark.parametrize("text", ["{", "[]", '{"modle": {}}', '{"model": {"config": {}}}'])
def test_the_worker_refuses_bad_input_in_one_line(text: str) -> None:
    done = worker(text)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
