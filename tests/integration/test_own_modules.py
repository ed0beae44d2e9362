"""Families whose own modules keep other tensors than the rest: formula against dry run."""

from __future__ import annotations

import pytest

from src.measure.dry_run import dry_run
from src.memory import estimate_step
from tests.matrix_specs import DEFAULTS, Spec

EAGER = {"attention": "eager", "checkpointing": "none", "shape": "2 x 1024"}


@pytest.mark.parametrize(
    ("model", "changes", "instant"),
    [
        # transformers 5 quantises no subclass of `nn.Linear`: falcon's weights stay as they are.
        ("falcon-7b", {"finetune": "qlora nf4"}, "load"),
        ("falcon-7b", {"finetune": "qlora nf4, no upcast"}, "optimizer_step"),
        # The clamped gate, and a softmax in the wider dtype of scores and sinks.
        ("gpt-oss-20b", EAGER | {"finetune": "lora"}, "last_block_backward"),
        ("gpt-oss-20b", EAGER | {"finetune": "qlora nf4, no upcast"}, "last_block_backward"),
        ("gpt-oss-20b", EAGER | {"precision": "bf16-true"}, "last_block_backward"),
    ],
)
def test_bytes_are_the_dry_runs(model: str, changes: dict[str, str], instant: str) -> None:
    case = Spec(model=model, setting=DEFAULTS | changes).case(blocks=2)
    formula, dry = estimate_step(case.step), dry_run(case)
    cells = next(cells for key, cells in formula.ledger.items() if key.value == instant)
    simulated = next(peak for key, peak in dry.instant_peaks.items() if key.value == instant)
    assert sum(cells.values()) == pytest.approx(simulated, rel=0.005)
    assert formula.peak_bytes.allocated == pytest.approx(dry.peak_bytes, rel=0.01)
