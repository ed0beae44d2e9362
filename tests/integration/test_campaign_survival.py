"""A campaign that is killed, interrupted or runs into a full disk loses no row and repeats none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.record import read_rows
from tests.mlflow_server import runs_of

ROOT = Path(__file__).resolve().parents[2]
NUM_CASES = 10

pytestmark = [
    # MLflow's own affair: SQLAlchemy deprecates what it uses, and it leaves databases open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROGRAM = """
import sys
from functools import partial
import src.config.campaign
from src.config import run_command
from src.measure.runner import Conditions
from src.profile import run
worker = (sys.executable, "-m", "tests.fake_worker", sys.argv[1])
src.config.campaign.Conditions = partial(Conditions, command=worker)
sys.exit(run_command(lambda: run(sys.argv[2:])))
"""


def start(folder: Path, mode: str, store: str, before: str = "") -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    asked = ["device=simulated", f"campaign.num_cases={NUM_CASES}", f"tracking.uri={store}"]
    return subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM, mode, *asked, f"out={folder / 'rows.jsonl'}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_moment_it_goes_on_in_rows_and_runs(tmp_path: Path) -> None:
    store, chance = f"sqlite:///{tmp_path / 'runs.db'}", random.Random(11)
    for _ in range(4):
        process = start(tmp_path, "sleep:0.4", store)
        time.sleep(chance.uniform(1.5, 5.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        ids = [row.case_id for row in read_rows(tmp_path / "rows.jsonl").rows]
        assert len(ids) == len(set(ids))
    process = start(tmp_path, "sleep:0.4", store)
    said, problems = process.communicate(timeout=300)
    assert process.returncode == 0, problems
    assert said.startswith(f"{NUM_CASES} of {NUM_CASES} cases have a row")
    found = read_rows(tmp_path / "rows.jsonl")
    assert (len(found.rows), found.damaged) == (NUM_CASES, ())
    assert len({row.case_id for row in found.rows}) == NUM_CASES
    parents, runs = runs_of(store)
    assert len(parents) == 1
    assert sorted(run.data.tags["row_id"] for run in runs) == sorted(
        row.row_id for row in found.rows
    )
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_an_interrupt_is_said_to_lose_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep:0.2", "http://127.0.0.1:9")
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    said, problems = process.communicate(timeout=60)
    assert first.startswith(f"[1/{NUM_CASES}, ends ")
    assert (process.returncode, said) == (130, "")
    assert "interrupted: every row so far is kept; the same command goes on" in problems
    assert "Traceback" not in problems
    rows = read_rows(tmp_path / "rows.jsonl")
    assert 1 <= len(rows.rows) < NUM_CASES
    assert rows.damaged == ()


def test_a_full_disk_ends_it_in_one_line_and_leaves_whole_rows(tmp_path: Path) -> None:
    limit = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
    )
    process = start(tmp_path, "ok", "http://127.0.0.1:9", before=limit)
    said, problems = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "")
    path = tmp_path / "rows.jsonl"
    assert problems.splitlines()[-1] == f"rows={path}: cannot be written (File too large)"
    assert "Traceback" not in problems
    rows = read_rows(path)
    assert 1 <= len(rows.rows) < NUM_CASES
    assert rows.damaged == ()
    assert path.read_bytes().endswith(b"\n")
