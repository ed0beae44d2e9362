"""Selective and sparse checkpointing in the formula against the same step's dry run.

A chunked loss leaves the peak to the blocks.
"""

from __future__ import annotations

import pytest

from src.measure.dry_run import dry_run
from src.memory import estimate_step
from src.spec import Loss
from tests.integration.test_losses_against_dry_run import case_of

SELECTIVE, SPARSE = "selective", "full, every 2nd"
CASES: list[tuple[str, str, dict[str, str]]] = [
    ("llama-3.2-1b", SELECTIVE, {}),
    ("gpt-neo-125m", SELECTIVE, {"attention": "eager", "precision": "bf16-true"}),
    ("bloom-560m", SELECTIVE, {"attention": "eager"}),
    ("bert-base-uncased", SELECTIVE, {"grad_accum": "2"}),
    ("pythia-410m", SELECTIVE, {"finetune": "lora", "precision": "bf16-true"}),
    ("falcon-7b", SELECTIVE, {"precision": "bf16-true"}),
    ("qwen3-0.6b", SELECTIVE, {"method": "fsdp"}),
    ("llama-3.2-1b", SPARSE, {"precision": "bf16-true"}),
    ("opt-350m", SPARSE, {"method": "fsdp"}),
    ("gpt2-medium", SPARSE, {"finetune": "lora", "precision": "bf16-true"}),
]


@pytest.mark.parametrize(("model", "policy", "changes"), CASES)
def test_what_is_recomputed_is_not_kept(model: str, policy: str, changes: dict[str, str]) -> None:
    setting = changes | {"checkpointing": policy, "loss": Loss.CHUNKED}
    case = case_of(model, setting, blocks=4)
    formula, dry = estimate_step(case.step), dry_run(case)
    assert formula.peak_bytes.allocated == pytest.approx(dry.peak_bytes, rel=0.005)
    everything = estimate_step(case_of(model, setting | {"checkpointing": "none"}, blocks=4).step)
    assert formula.peak_bytes.allocated < everything.peak_bytes.allocated
