"""`python -m src.profile` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.profile import run as run_profile
from src.record import Source, open_rows, read_rows
from tests.commands import run_here
from tests.mlflow_server import runs_of

ROOT = Path(__file__).resolve().parents[2]
TWO_CASES = ["campaign.models=pythia-70m", "campaign.num_cases=2", "campaign.fill=[0.2,0.4]"]
TWO_CASES += ["campaign.beyond=0"]

pytestmark = [
    # MLflow's own affair: SQLAlchemy deprecates what it uses, and it leaves databases open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def run(folder: Path, *arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a folder of its own, or a program of the test's."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *(["-c", program] if program else ["-m", "src.profile"]), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def places(folder: Path) -> list[str]:
    return [f"out={folder / 'rows.jsonl'}", f"tracking.uri=sqlite:///{folder / 'runs.db'}"]


def test_a_simulated_campaign_ends_in_rows_and_runs(tmp_path: Path) -> None:
    program = (
        "import sys; from src.profile import run\n"
        "code = run(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'this process runs no step'\n"
        "sys.exit(code)\n"
    )
    asked = ["campaign=smoke", "device=simulated", *TWO_CASES, *places(tmp_path)]
    done = run(tmp_path, *asked, program=program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 of 2 cases have a row (simulated): 2 ok\n")
    first, second = done.stderr.splitlines()
    assert first.startswith("[1/2, ends ")
    assert second.startswith("[2/2, ends ")
    assert "GiB device (simulated)" in second
    rows = read_rows(tmp_path / "rows.jsonl").rows
    assert [row.source for row in rows] == [Source.SIMULATED] * 2
    parents, runs = runs_of(f"sqlite:///{tmp_path / 'runs.db'}")
    assert (len(parents), len(runs)) == (1, 2)
    assert {run.data.tags["row_id"] for run in runs} == {row.row_id for row in rows}
    for each in runs:
        assert abs(each.data.metrics["formula_allocated_error"]) < 0.2
    again = run(tmp_path, *asked)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == done.stdout
    assert len(read_rows(tmp_path / "rows.jsonl").rows) == 2
    assert len(runs_of(f"sqlite:///{tmp_path / 'runs.db'}")[1]) == 2


def test_rows_survive_a_store_that_is_away_and_are_logged_later(tmp_path: Path) -> None:
    one = ["device=simulated", *TWO_CASES, "campaign.num_cases=1", f"out={tmp_path / 'rows.jsonl'}"]
    done = run(tmp_path, *one, "tracking.uri=http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "warning: rows are missing in MLflow (" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(read_rows(tmp_path / "rows.jsonl").rows) == 1
    later = run(tmp_path, "sync=true", *places(tmp_path))
    assert later.stdout == f"{tmp_path / 'rows.jsonl'}: 1 of 1 rows were missing\n"
    assert run(tmp_path, "sync=true", *places(tmp_path)).stdout.endswith(
        ": 0 of 1 rows were missing\n"
    )


def test_the_plan_is_listed_and_written_for_another_machine(tmp_path: Path) -> None:
    asked = ["device=cuda", "gpu=h200", "campaign=recalibrate", "campaign.num_cases=9"]
    cases = tmp_path / "cases.jsonl"
    done = run(tmp_path, "plan_only=true", *asked, *places(tmp_path), f"cases={cases}")
    assert (done.returncode, done.stderr) == (0, "")
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["case", "model", "method"]
    assert len(lines) == 9
    assert max(map(len, lines)) <= 140
    written = [json.loads(line) for line in cases.read_text().splitlines()]
    assert {case["device"] for case in written} == {"cuda"}
    assert {case["gpu"]["sku"] for case in written} == {"h200"}
    assert set(tmp_path.iterdir()) == {cases}


ERRORS = [
    (["campaign=smok"], "campaign=smok: "),
    (["device=tpu"], "device=tpu: "),
    (["gpus=2"], "gpus=2: unknown key; did you mean campaign.num_gpus?"),
    (["--device", "cuda"], "option=--device: "),
    (["-m", "campaign=smoke"], "option=-m: no sweeps; a campaign is many cases"),
    (["device=simulated", "out=/proc/none/rows.jsonl"], "rows=/proc/none/rows.jsonl: cannot be"),
    (["tracking.uri=nowhere"], "tracking.uri=nowhere: sqlite:///FILE"),
    (["sync=true", "out=none.jsonl", "tracking.uri=sqlite:///runs.db"], "out="),
]


@pytest.mark.parametrize(("arguments", "said"), ERRORS, ids=[" ".join(a) for a, _ in ERRORS])
def test_wrong_input_is_one_line_and_exit_1(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = run_here(run_profile, tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_measuring_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(tmp_path, "device=cuda", *places(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("device=cuda: torch sees no CUDA GPU")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_campaign_on_the_same_rows_is_refused(tmp_path: Path) -> None:
    with open_rows(tmp_path / "rows.jsonl"):
        done = run_here(run_profile, tmp_path, "device=simulated", *places(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"rows={tmp_path / 'rows.jsonl'}: another process is adding rows to it\n"


def test_help_and_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("What do training steps really take?")
    assert run_here(run_profile, tmp_path, "--version").stdout.startswith("peakcast ")
    composed = run_here(run_profile, tmp_path, "--cfg", "job", "campaign=paper").stdout
    assert "name: paper" in composed
    assert list(tmp_path.iterdir()) == []


def test_a_row_of_someones_training_is_logged(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.integrations.test_trainer_callback import Statistics, train\n"
        "from src.integrations import trainer\n"
        "machine = trainer.Machine(\n"
        "    statistics=Statistics(), gpu=trainer.A100_80GB, environment={'gpu': 'A100'})\n"
        "trainer.this_machine = lambda: machine\n"
        "train(Path(sys.argv[1]))\n"
    )
    made = run(tmp_path, str(tmp_path), program=program)
    assert made.returncode == 0, made.stderr
    file, store = tmp_path / "out" / "peakcast.jsonl", f"sqlite:///{tmp_path / 'runs.db'}"
    done = run(tmp_path, "sync=true", f"out={file}", f"tracking.uri={store}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{file}: 1 of 1 rows were missing\n"
    (logged,) = runs_of(store, "trainer")[1]
    assert logged.data.tags["source"] == "measured"
    assert {"formula_allocated_error", "dry_run_allocated_error"} <= set(logged.data.metrics)
