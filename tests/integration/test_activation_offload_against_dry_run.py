"""Offloaded activations in the formula against the same step's dry run, on GPU and host."""

from __future__ import annotations

import pytest

from src.measure.dry_run import dry_run
from src.memory import estimate_step
from src.spec import Loss
from tests.integration.test_losses_against_dry_run import case_of

OFFLOAD = {"switch": "activation_offload"}
CASES: list[tuple[str, dict[str, str]]] = [
    ("llama-3.2-1b", {}),
    ("llama-3.2-1b", {"checkpointing": "none", "precision": "bf16-true", "loss": Loss.CHUNKED}),
    ("llama-3.2-1b", {"checkpointing": "selective", "loss": Loss.LIGER}),
    ("gpt2-medium", {"checkpointing": "full, every 2nd", "loss": Loss.CHUNKED}),
    ("gpt2-medium", {"checkpointing": "none", "finetune": "lora", "precision": "bf16-true"}),
    ("opt-350m", {"checkpointing": "none", "method": "fsdp"}),
    ("bert-base-uncased", {"checkpointing": "selective", "attention": "eager"}),
]


@pytest.mark.parametrize(("model", "changes"), CASES)
def test_gpu_and_host_need_what_the_dry_run_needs(model: str, changes: dict[str, str]) -> None:
    case = case_of(model, OFFLOAD | changes, blocks=4)
    formula, dry = estimate_step(case.step), dry_run(case)
    assert formula.peak_bytes.allocated == pytest.approx(dry.peak_bytes, rel=0.005)
    assert formula.host_bytes == pytest.approx(dry.saved_on_host_bytes, rel=0.005)


def test_a_model_run_short_has_the_host_bytes_of_its_whole_depth() -> None:
    changes = {"checkpointing": "none", "precision": "bf16-true", "loss": Loss.CHUNKED}
    case = case_of("llama-3.2-1b", OFFLOAD | changes, blocks=8)
    short, whole = dry_run(case), dry_run(case, whole=True)
    assert short.saved_on_host_bytes == whole.saved_on_host_bytes
    assert short.peak_bytes == whole.peak_bytes
