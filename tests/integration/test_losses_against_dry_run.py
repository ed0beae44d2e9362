"""Every loss in the formula against the same step's dry run, instant by instant."""

from __future__ import annotations

import pytest

from src.measure.case import Case
from src.measure.dry_run import dry_run
from src.memory import estimate_step
from src.spec import Loss
from tests.matrix_specs import DEFAULTS, Spec

SETTING = {**DEFAULTS, "optimizer": "adamw-fused", "shape": "4 x 512"}
BOTH = ("forward_end", "loss_backward")
CASES = [
    ("llama-3.2-1b", Loss.STANDARD_4X, {}, BOTH),
    ("opt-350m", Loss.STANDARD_4X, {}, BOTH),
    ("gpt-neo-125m", Loss.STANDARD_4X, {"precision": "bf16-true", "attention": "eager"}, BOTH),
    ("codegen-350m", Loss.STANDARD_4X, {"precision": "fp16-mixed"}, BOTH),
    ("opt-350m", Loss.STANDARD_4X, {"shape": "1 x 512"}, BOTH),
    ("llama-3.2-1b", Loss.CHUNKED, {"precision": "bf16-true"}, ("loss_backward",)),
    ("opt-350m", Loss.CHUNKED, {"checkpointing": "none", "grad_accum": "2"}, ()),
    ("gemma-2-2b", Loss.CHUNKED, {"attention": "eager"}, BOTH),
    ("llama-3.2-1b", Loss.LIGER, {}, ("forward_end",)),
    ("qwen3-0.6b", Loss.LIGER, {"precision": "fp32", "checkpointing": "none"}, ("forward_end",)),
    ("llama-3.2-1b", Loss.LIGER, {"finetune": "lora", "precision": "bf16-true"}, ()),
    (
        "llama-3.2-1b",
        Loss.LIGER,
        {"gpu": "v100-32gb", "precision": "fp16-mixed", "grad_accum": "2"},
        ("forward_end",),
    ),
]
"""And the instants that the loss sets: elsewhere one block, running forward, needs more."""


def case_of(model: str, changes: dict[str, str], *, blocks: int = 2) -> Case:
    return Spec(model=model, setting=SETTING | changes).case(blocks=blocks)


@pytest.mark.parametrize(("model", "loss", "changes", "instants"), CASES)
def test_the_loss_needs_what_the_dry_run_needs(
    model: str, loss: Loss, changes: dict[str, str], instants: tuple[str, ...]
) -> None:
    case = case_of(model, changes | {"loss": loss})
    formula, dry = estimate_step(case.step), dry_run(case)
    assert formula.peak_bytes.allocated == pytest.approx(dry.peak_bytes, rel=0.005)
    simulated = {instant.value: num_bytes for instant, num_bytes in dry.instant_peaks.items()}
    for instant, terms in formula.ledger.items():
        if instant.value in instants:
            assert sum(terms.values()) == pytest.approx(simulated[instant.value], rel=0.005)
