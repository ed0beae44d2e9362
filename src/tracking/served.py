"""The registered model's code, which MLflow runs where it loads the model: no pickle is made.

One column `case`, each a step as JSON like `src.measure.worker` takes it; six columns of bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

from src.measure.case import parse_case
from src.record import LEVELS
from src.residual.estimator import Calibrated
from src.residual.files import read_champion


class Residual(PythonModel):
    """The formula with the champion."""

    def load_context(self, context: Any) -> None:
        """Read the champion's files."""
        self.calibrated = Calibrated(read_champion(Path(context.artifacts["champion"])))

    def predict(
        self, context: Any, model_input: Any, params: dict[str, Any] | None = None
    ) -> list[dict[str, int]]:
        """Bytes of every level and their upper bounds, one object for each case."""
        del context, params
        return [self._answer(json.loads(case)) for case in model_input["case"]]

    def _answer(self, case: Any) -> dict[str, int]:
        estimate = self.calibrated(parse_case(case).step)
        peaks = {f"{level}_bytes": getattr(estimate.peak_bytes, level) for level in LEVELS}
        uppers = {f"upper_{level}_bytes": getattr(estimate.upper_bytes, level) for level in LEVELS}
        return peaks | uppers


set_model(Residual())  # MLflow executes this file as it loads the model, and asks for this call
