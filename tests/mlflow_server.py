"""A real `mlflow server` for tests, and what a store holds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
_START_S = 90


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running_server(folder: Path, port: int) -> Iterator[str]:
    """The address of a server whose runs lie in `folder`."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not start")


def runs_of(uri: str, campaign: str = "smoke") -> tuple[list[Any], list[Any]]:
    """The parent runs and the rows' runs of a campaign's experiment."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(f"peakcast-{campaign}")
    if experiment is None:
        return [], []
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.data.tags.get("role") == "campaign"]
    return parents, [run for run in runs if "row_id" in run.data.tags]
