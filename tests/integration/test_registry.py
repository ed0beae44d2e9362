"""The way through MLflow: rows logged, read back, a champion registered, served, rolled back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.measure.case import parse_case
from src.record import add_rows
from src.residual.estimator import Calibrated
from src.residual.files import read_champion
from src.tracking import Log, logged_rows, sync
from tests.calibration_rows import rows_of, steps
from tests.integration.test_train_cli import SHIFTED, train

pytestmark = [
    # MLflow's own affair: SQLAlchemy deprecates what it uses, and it leaves databases open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OLD, NEW = rows_of(steps(34)), SHIFTED[:34]


def log(folder: Path, rows: list[Any], name: str) -> str:
    """Log rows to a database of the folder's; its address."""
    uri = f"sqlite:///{folder / 'runs.db'}"
    add_rows(folder / name, rows)
    sync(Log(uri, compare=lambda _: {}, draw=lambda _: None, page=lambda _: None), folder / name)
    return uri


def aliases(uri: str) -> dict[str, int]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = client.get_registered_model("peakcast-residual").aliases
    return {name: int(version) for name, version in found.items()}


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    uri = log(tmp_path, OLD[:5], "rows.jsonl")
    found = logged_rows(uri)
    assert {row.row_id for row in found.rows} == {row.row_id for row in OLD[:5]}
    assert not found.unread
    artifact = next((tmp_path / "mlruns").rglob("row.json"))
    artifact.write_text(artifact.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    damaged = logged_rows(uri)
    assert len(damaged.rows) == 4
    assert [one.reason for one in damaged.unread] == ["schema_version: unknown schema version 7"]
    assert damaged.unread[0].row_id in {row.row_id for row in OLD[:5]}


def test_a_champion_is_registered_served_and_rolled_back(tmp_path: Path) -> None:
    uri = log(tmp_path, OLD, "old.jsonl")
    asked = [f"tracking.uri={uri}", f"out={tmp_path / 'residual'}"]
    asked += ["residual.kinds=[constant,allocator,allocator+trees]", "residual.trees.rounds=10"]
    first = train(tmp_path, *asked)
    assert first.returncode == 0, first.stderr
    assert first.stdout.rstrip().endswith("champion moved")
    assert aliases(uri) == {"champion": 1}
    log(tmp_path, NEW, "new.jsonl")
    second = train(tmp_path, *asked)
    assert second.stdout.rstrip().endswith("champion moved"), second.stdout + second.stderr
    assert aliases(uri) == {"champion": 2, "previous": 1}
    assert not list((tmp_path / "mlruns").rglob("*.pkl"))
    served = serve(uri, OLD[0].case)
    step = parse_case(OLD[0].case).step
    mine = Calibrated(read_champion(tmp_path / "residual"))(step)
    assert served["device_bytes"] == mine.peak_bytes.device
    assert served["upper_device_bytes"] == mine.upper_bytes.device
    newer = read_champion(tmp_path / "residual").version
    back = train(tmp_path, *asked, "rollback=true")
    assert back.returncode == 0, back.stderr
    assert back.stdout.rstrip().endswith("again, version 1 of the registry")
    assert aliases(uri) == {"champion": 1, "previous": 2}
    assert read_champion(tmp_path / "residual").version != newer


def serve(uri: str, case: Any) -> dict[str, int]:
    """What the registered champion says of a case, in a process that has only MLflow's copy."""
    program = (
        "import json, sys, mlflow, pandas\n"
        f"mlflow.set_tracking_uri({uri!r}); mlflow.set_registry_uri({uri!r})\n"
        "model = mlflow.pyfunc.load_model('models:/peakcast-residual@champion')\n"
        "frame = pandas.DataFrame({'case': [sys.stdin.read()]})\n"
        "print(json.dumps(model.predict(frame)[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        input=json.dumps(case),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_empty_store_has_too_few_rows(tmp_path: Path) -> None:
    done = train(tmp_path, f"tracking.uri=sqlite:///{tmp_path / 'new.db'}", "out=residual")
    assert done.returncode == 1
    assert "30 more rows" in done.stderr


def test_a_server_that_is_away_is_told_in_one_line(tmp_path: Path) -> None:
    done = train(tmp_path, "tracking.uri=http://127.0.0.1:9", "out=residual")
    assert done.returncode == 1
    assert done.stderr.startswith("tracking.uri=http://127.0.0.1:9: ")
    assert len(done.stderr.splitlines()) == 1
