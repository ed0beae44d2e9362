"""Answering imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "mlflow", "sklearn", "lightgbm", "pandas", "matplotlib")


@pytest.mark.parametrize(
    "program",
    [
        "import src.estimate",
        "from src.estimate import estimate; estimate(model='opt-1.3b', gpus=4)",
        "from src.estimate import estimate; estimate(model='opt-1.3b', gpus=4, estimator='llmem')",
    ],
)
def test_nothing_heavy_is_loaded(program: str) -> None:
    check = f"{program}\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
