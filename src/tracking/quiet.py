"""How MLflow is kept from talking and from waiting."""

from __future__ import annotations

import logging
import os

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
"""stdout is the command's, and a server that is away is given up on in seconds. What is set already
stays."""

_MOST_CHARACTERS = 200


def quiet() -> None:
    """Prepare the environment for MLflow, before it is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)


def first_line(error: Exception) -> str:
    """An error of MLflow's in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    return f"{kind}: {lines[0][:_MOST_CHARACTERS]}" if lines else kind
