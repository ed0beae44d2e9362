"""A campaign whose cases are jobs of submitit's local executor, from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from src.launch import Jobs, run_campaign
from src.measure.runner import Conditions
from src.record import Outcome, Source, open_rows, read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PROGRAM = """
import json, sys
from pathlib import Path
from tests.integration.test_launcher import campaign
campaign(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


def case(micro_batch: int, **config: Any) -> dict[str, Any]:
    model = {"name": "tiny", "config": TINY | config}
    return {"device": "simulated", "model": model, "seq_len": 16, "micro_batch": micro_batch}


def campaign(folder: Path, cases: list[dict[str, Any]], *, max_jobs: int = 2) -> list[str]:
    """Run the cases as jobs; the outcomes in the order in which they came."""
    jobs = Jobs(
        cluster="local",
        folder=folder / "jobs",
        max_jobs=max_jobs,
        gpus_per_node=1,
        minutes=5,
        sbatch={},
    )
    conditions = Conditions(campaign="smoke", timeout_s=100)
    with open_rows(folder / "rows.jsonl", wait_s=10) as file:
        return [row.outcome.value for row in run_campaign(cases, file, conditions, jobs)]


def test_cases_end_in_rows_and_one_that_cannot_be_run_is_a_row_too(tmp_path: Path) -> None:
    cases = [case(1), case(2), case(1, model_type="unheard-of")]
    assert sorted(campaign(tmp_path, cases, max_jobs=3)) == ["crashed", "ok", "ok"]
    found = read_rows(tmp_path / "rows.jsonl")
    rows = {json.dumps(row.case, sort_keys=True): row for row in found.rows}
    first, second, wrong = (rows[json.dumps(case, sort_keys=True)] for case in cases)
    assert (found.damaged, len(found.rows)) == ((), 3)
    assert 0 < first.peak_bytes["allocated"] < second.peak_bytes["allocated"]
    assert {row.source for row in found.rows} == {Source.SIMULATED}
    assert {row.provenance.campaign for row in found.rows} == {"smoke"}
    assert wrong.outcome is Outcome.CRASHED
    assert "unheard-of" in (wrong.message or "")
    assert {path.suffix for path in (tmp_path / "jobs").iterdir()} <= {".err", ".out", ".pkl"}
    assert campaign(tmp_path, cases) == []


def test_a_killed_campaign_goes_on_and_nothing_is_run_twice(tmp_path: Path) -> None:
    cases = [case(1), case(2)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": path},
    )
    give_up = time.monotonic() + 60
    jobs = tmp_path / "jobs"
    # Both jobs are under way and have made their files: the moment at which most could be lost.
    while len([file for file in jobs.glob("*.jsonl") if ".case" not in file.name]) < 2:
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_rows = len(read_rows(tmp_path / "rows.jsonl").rows)
    assert num_rows < 2
    assert campaign(tmp_path, cases) == ["ok"] * (2 - num_rows)
    assert len({row.case_id for row in read_rows(tmp_path / "rows.jsonl").rows}) == 2
    assert len(list(jobs.glob("*_submitted.pkl"))) == 2


def test_a_job_that_leaves_no_row_is_a_row(tmp_path: Path) -> None:
    jobs = Jobs(
        cluster="local",
        folder=tmp_path / "jobs",
        max_jobs=1,
        gpus_per_node=1,
        minutes=5,
        sbatch={},
    )
    # The worker takes this name for an option that it does not have.
    conditions = Conditions(campaign="--nothing", timeout_s=100)
    with open_rows(tmp_path / "rows.jsonl") as file:
        (row,) = run_campaign([case(1)], file, conditions, jobs)
    assert row.outcome is Outcome.CRASHED
    assert (row.message or "").startswith("local job ")
    assert "left no row (FINISHED): " in (row.message or "")
    assert "--campaign: expected one argument" in (row.message or "")
