"""Rows in MLflow: in a database, on a real server, on one that is away, slow or refuses."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.record import Outcome, Row, open_rows
from src.report.page_row import draw_page
from src.report.plot_row import draw_row
from src.tracking import Log, Tracker, sync
from src.tracking.background import CLOSE_S
from src.units import Levels
from tests.mlflow_server import free_port, running_server, runs_of
from tests.rows import CASE, GIB, MEASURED, SIMULATED

pytestmark = [
    # MLflow's own affair: SQLAlchemy deprecates what it uses, and it leaves databases open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    replace(SIMULATED, case=CASE | {"micro_batch": 1}),
    replace(SIMULATED, case=CASE | {"micro_batch": 2}, outcome=Outcome.OOM, message="CUDA out"),
    replace(SIMULATED, case=CASE | {"micro_batch": 3}, outcome=Outcome.CRASHED, peak_bytes={}),
]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a Log sets for its process does not outlive the test; a busy machine has time."""
    before = dict(os.environ)
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "60"
    yield
    os.environ.clear()
    os.environ.update(before)


def compare(_row: Row) -> Mapping[str, Levels]:
    return {"formula": Levels(allocated=9 * GIB, reserved=12 * GIB, device=13 * GIB)}


def make_log(uri: str) -> Log:
    return Log(uri, compare=compare, draw=draw_row, page=draw_page)


def write(path: Path, rows: list[Row] = ROWS) -> Path:
    with open_rows(path) as file:
        for row in rows:
            file.append(row)
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("server"), free_port()) as address:
        yield address


@pytest.fixture(params=["database", "server"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "server":
        address: str = request.getfixturevalue("server")
        return address
    return f"sqlite:///{tmp_path / 'runs.db'}"


def test_a_campaign_is_an_experiment_and_each_row_a_run_once(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    name = f"once-{tmp_path.name}"
    rows = [replace(r, provenance=replace(r.provenance, campaign=name)) for r in ROWS]
    path = write(tmp_path / "rows.jsonl", rows)
    assert sync(make_log(store), path) == (3, 3)
    assert sync(make_log(store), path) == (0, 3)
    assert capsys.readouterr().out == ""
    (parent,), runs = runs_of(store, name)
    by_outcome = {run.data.tags["outcome"]: run for run in runs}
    assert len(runs) == len(by_outcome) == 3
    assert by_outcome["oom"].info.status == "FINISHED"
    assert by_outcome["crashed"].info.status == "FAILED"
    ok = by_outcome["ok"]
    assert ok.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert ok.data.tags["source"] == "simulated"
    assert ok.data.params["model.config.n_layer"] == "2"
    assert ok.data.metrics["formula_allocated_error"] == pytest.approx(-0.1)
    assert "formula_allocated_error" not in by_outcome["oom"].data.metrics
    assert ok.info.end_time - ok.info.start_time == 1500
    client = MlflowClient(tracking_uri=store)
    names = {each.path for each in client.list_artifacts(ok.info.run_id)}
    assert names == {"row.json", "ledger.json", "timeline.png"}
    local = client.download_artifacts(ok.info.run_id, "row.json", str(tmp_path))
    assert Row.from_json(json.loads(Path(local).read_text())) == rows[0]
    assert parent.data.metrics == {"rows": 3, "ok": 1, "oom": 1, "crashed": 1}
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["rows.jsonl"]
    (dataset,) = client.get_run(parent.info.run_id).inputs.dataset_inputs
    assert dataset.dataset.name == f"{name}-a100-80gb-simulated"
    assert json.loads(dataset.dataset.profile)["num_rows"] == 3


def test_measured_and_simulated_rows_have_parents_of_their_own(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    sync(make_log(store), write(tmp_path / "rows.jsonl", [SIMULATED, MEASURED]))
    parents, runs = runs_of(store)
    assert {run.data.tags["source"] for run in parents} == {"measured", "simulated"}
    assert len({run.data.tags["mlflow.parentRunId"] for run in runs}) == 2


def test_a_run_that_was_cut_off_is_taken_up_again(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    path = write(tmp_path / "rows.jsonl")

    class KilledError(Exception):
        pass

    def kill(_row: Row) -> Any:
        raise KilledError

    with pytest.raises(KilledError):
        Log(store, compare=compare, draw=kill, page=draw_page).add(ROWS[0])
    assert runs_of(store)[1][0].info.status == "RUNNING"
    assert sync(make_log(store), path) == (3, 3)
    _, runs = runs_of(store)
    assert len(runs) == 3
    assert {run.info.status for run in runs} == {"FINISHED", "FAILED"}


def test_without_rows_there_is_nothing_to_log(tmp_path: Path) -> None:
    log = make_log(f"sqlite:///{tmp_path / 'runs.db'}")
    with pytest.raises(UserError, match="a file of rows"):
        sync(log, tmp_path / "rows.jsonl")


def test_rows_are_logged_beside_the_campaign(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    path = write(tmp_path / "rows.jsonl")
    with Tracker(make_log(store), path, ROWS[:1]) as tracker:
        for row in ROWS[1:]:
            tracker.add(row)
    assert tracker.problem is None
    parents, runs = runs_of(store)
    assert (len(parents), len(runs)) == (1, 3)


def test_a_server_that_is_away_costs_no_time_and_rows_are_logged_later(
    server: str, tmp_path: Path
) -> None:
    name = f"later-{tmp_path.name}"
    rows = [replace(r, provenance=replace(r.provenance, campaign=name)) for r in ROWS]
    port, path = free_port(), write(tmp_path / "rows.jsonl", rows)
    log = make_log(f"http://127.0.0.1:{port}")
    begun = time.monotonic()
    tracker = Tracker(log, path)
    for row in rows:
        tracker.add(row)
    assert time.monotonic() - begun < 0.5, "adding does not wait"
    with tracker:
        pass
    assert time.monotonic() - begun < CLOSE_S
    assert tracker.problem is not None
    with pytest.raises(UserError, match=rf"tracking\.uri=http://127\.0\.0\.1:{port}"):
        sync(make_log(log.uri), path)
    assert sync(make_log(server), path) == (3, 3)
    assert len(runs_of(server, name)[1]) == 3


class Silent(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(20)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


class Refusing(Silent):
    def do_GET(self) -> None:
        self.send_error(403, "no")

    do_POST = do_GET  # noqa: N815


@pytest.mark.parametrize("kind", [Silent, Refusing])
def test_a_server_that_is_slow_or_refuses_is_given_up_on(
    kind: type[Silent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.tracking.background.CLOSE_S", 4.0)
    path = write(tmp_path / "rows.jsonl")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        begun = time.monotonic()
        with Tracker(make_log(f"http://127.0.0.1:{server.server_port}"), path) as tracker:
            tracker.add(ROWS[0])
        assert time.monotonic() - begun < 10
        assert tracker.problem is not None
    finally:
        server.shutdown()
        server.server_close()


SYNC = """
import sys
from pathlib import Path
from src.tracking import Log, sync
log = Log(sys.argv[1], compare=lambda row: {}, draw=lambda row: None, page=lambda row: None)
print(sync(log, Path(sys.argv[2])))
"""


def test_two_at_once_make_one_database_and_lose_nothing(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    files = [
        write(
            tmp_path / f"{name}.jsonl",
            [replace(row, case=row.case | {"seq_len": length}) for row in ROWS],
        )
        for name, length in (("left", 256), ("right", 512))
    ]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SYNC, store, str(file)],
            cwd=ROOT,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for file in (*files, files[0])
    ]
    said = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0, 0], said
    parents, runs = runs_of(store)
    assert len(parents) == 1
    assert len(runs) == len({run.data.tags["row_id"] for run in runs}) == 6
    assert {run.info.status for run in runs} == {"FINISHED", "FAILED"}
