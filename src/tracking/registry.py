"""Champions in MLflow's model registry: each a version, two of them with an alias."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.record import LEVELS
from src.tracking.address import sqlite_path
from src.tracking.log import KIND
from src.tracking.quiet import first_line, quiet

MODEL = "peakcast-residual"
CHAMPION, PREVIOUS = "champion", "previous"
EXPERIMENT = "peakcast-residual"

_SOURCE = Path(__file__).resolve().parents[1]
_SERVED = Path(__file__).with_name("served.py")
_REQUIRED = ("numpy", "lightgbm")


class Registry:
    """The registered versions of one store.

    Args:
        uri: its address, as `resolve_uri` gives it.
    """

    def __init__(self, uri: str) -> None:
        quiet()
        self.uri = uri

    def register(self, folder: Path, metrics: Mapping[str, Any], rows_hash: str) -> int:
        """Log the champion of a folder, register it, and move the aliases; its version.

        Args:
            folder: the champion's files.
            metrics: the champion's.
            rows_hash: names the rows it was learned from.

        Raises:
            UserError: the store is not to be reached, or refuses.
        """
        try:
            version = self._log(folder, metrics, rows_hash)
            self._move(version)
        except Exception as error:  # whatever MLflow raises is about its store
            raise self._refused(error) from error
        return version

    def roll_back(self) -> int:
        """Exchange the aliases; the version that is champion now.

        Raises:
            UserError: there is no previous champion, or the store is not to be reached.
        """
        try:
            client = self._client()
            champion, previous = (self._aliased(client, name) for name in (CHAMPION, PREVIOUS))
        except Exception as error:
            raise self._refused(error) from error
        if previous is None:
            raise UserError(key="rollback", value="true", allowed=f"no {PREVIOUS} {MODEL} yet")
        try:
            client.set_registered_model_alias(MODEL, CHAMPION, str(previous))
            if champion is not None:
                client.set_registered_model_alias(MODEL, PREVIOUS, str(champion))
        except Exception as error:
            raise self._refused(error) from error
        return previous

    def _refused(self, error: Exception) -> UserError:
        return UserError(key="tracking.uri", value=self.uri, allowed=first_line(error))

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def _log(self, folder: Path, metrics: Mapping[str, Any], rows_hash: str) -> int:
        import mlflow
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, DataType, Schema

        mlflow.set_tracking_uri(self.uri)
        mlflow.set_registry_uri(self.uri)
        names = [f"{level}_bytes" for level in LEVELS]
        outputs = [*names, *(f"upper_{name}" for name in names)]
        signature = ModelSignature(
            inputs=Schema([ColSpec(DataType.string, "case")]),
            outputs=Schema([ColSpec(DataType.long, name) for name in outputs]),
        )
        required = [f"{name}=={importlib.metadata.version(name)}" for name in _REQUIRED]
        with mlflow.start_run(experiment_id=self._experiment(), run_name=MODEL):
            mlflow.log_metrics(flat_metrics(metrics))
            mlflow.log_param("rows_hash", rows_hash)
            logged = mlflow.pyfunc.log_model(
                name=MODEL,
                python_model=str(_SERVED),
                artifacts={CHAMPION: str(folder)},
                code_paths=[str(_SOURCE)],
                signature=signature,
                pip_requirements=required,
                registered_model_name=MODEL,
            )
        return int(logged.registered_model_version)

    def _experiment(self) -> str:
        client = self._client()
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        database = sqlite_path(self.uri)
        place = None if database is None else (database.parent / "mlruns" / EXPERIMENT).as_uri()
        return str(client.create_experiment(EXPERIMENT, artifact_location=place, tags=KIND))

    def _move(self, version: int) -> None:
        client = self._client()
        champion = self._aliased(client, CHAMPION)
        if champion is not None:
            client.set_registered_model_alias(MODEL, PREVIOUS, str(champion))
        client.set_registered_model_alias(MODEL, CHAMPION, str(version))

    def _aliased(self, client: Any, alias: str) -> int | None:
        from mlflow.exceptions import MlflowException

        try:
            return int(client.get_model_version_by_alias(MODEL, alias).version)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise


def flat_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """A champion's metrics as MLflow takes them: errors of what was kept, on families left out."""
    found: dict[str, float] = {}
    for level, of_level in metrics.items():
        score = of_level["scores"].get("family", {}).get(of_level["kind"], {})
        found |= {f"{level}_{name}": float(value) for name, value in score.items()}
        found |= {f"{level}_bound_{name}": float(n) for name, n in of_level["bound"].items()}
    assert json.dumps(found, allow_nan=False)
    return found
