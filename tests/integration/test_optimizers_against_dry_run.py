"""Each optimizer's bytes: the formula against real optimizers on fake tensors."""

from __future__ import annotations

import pytest

from src.measure.dry_run import dry_run
from src.memory import Instant, ledger_of
from src.spec import Optimizer
from tests.matrix_specs import DEFAULTS, Spec


@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_optimizer_step_is_the_same(optimizer: Optimizer, precision: str) -> None:
    setting = {**DEFAULTS, "optimizer": optimizer.value, "precision": precision}
    case = Spec(model="llama-3.2-1b", setting=setting).case(blocks=2)
    dry = dry_run(case).instant_peaks
    formula = ledger_of(case.step)
    for instant in (Instant.OPTIMIZER_STEP, Instant.GRADIENT_SYNC):
        expected = {key.value: value for key, value in dry.items()}[instant.value]
        assert sum(formula[instant].values()) == pytest.approx(expected, rel=3e-4)
