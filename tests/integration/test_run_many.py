"""The worker's form for many cases, where nothing but Python, torch and transformers is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.record import Outcome, Source, read_rows

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "name": "tiny",
    "config": {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
}
CASES: list[dict[str, Any]] = [
    {"model": MODEL, "micro_batch": 2, "method": "fsdp", "layout": {"dp": 4, "shard": 4}},
    {"model": MODEL, "micro_batch": 200000},
]
ABSENT = ("hydra", "omegaconf", "mlflow", "lightgbm", "sklearn", "scipy", "pandas", "matplotlib")
HIDING = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {ABSENT!r}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    return path


def run_many(
    python: Path | str, cases: Path, rows: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """As on another machine: from the project's folder, without a package installed."""
    return subprocess.run(
        [str(python), "-m", "src.measure.worker", "--run-many", str(cases), "--rows", str(rows)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def check(done: subprocess.CompletedProcess[str], rows: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": 1, "oom": 1}
    fitting, too_large = read_rows(rows).rows
    assert (fitting.outcome, too_large.outcome) == (Outcome.OK, Outcome.OOM)
    assert {fitting.source, too_large.source} == {Source.SIMULATED}
    assert fitting.provenance.campaign == "cases"
    assert fitting.peak_bytes["device"] > fitting.peak_bytes["reserved"]
    assert too_large.oom_instant is not None
    assert "CUDA out of memory" in str(too_large.message)
    assert fitting.versions.keys() >= {"torch", "transformers"}


def test_it_runs_where_the_rest_cannot_be_imported(cases: Path, tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(HIDING)
    hidden = subprocess.run(
        [sys.executable, "-c", "import hydra"],
        env={**os.environ, "PYTHONPATH": str(hiding)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "No module named 'hydra'" in hidden.stderr
    rows = tmp_path / "rows.jsonl"
    check(run_many(sys.executable, cases, rows, PYTHONPATH=str(hiding)), rows)
    again = run_many(sys.executable, cases, rows, PYTHONPATH=str(hiding))
    assert (again.stdout, again.stderr) == ('{"ok": 1, "oom": 1}\n', "")
    assert len(read_rows(rows).rows) == 2


@pytest.mark.slow
def test_it_runs_in_an_environment_of_torch_and_transformers_alone(
    cases: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    for package in ("torch==2.13.0", "transformers"):
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert not names & {"hydra-core", "mlflow", "lightgbm", "scikit-learn", "pandas"}
    rows = tmp_path / "rows.jsonl"
    check(run_many(python, cases, rows), rows)


def test_the_process_that_starts_them_imports_no_torch(cases: Path, tmp_path: Path) -> None:
    arguments = ["--run-many", str(cases), "--rows", str(tmp_path / "rows.jsonl")]
    program = (
        "import sys; from src.measure.runner import Conditions; from src.measure import run_many\n"
        "fake = (sys.executable, '-m', 'tests.fake_worker', 'ok')\n"
        "run_many.Conditions = lambda **keys: Conditions(**keys, command=fake)\n"
        f"assert run_many.run_many({arguments!r}) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, '{"ok": 2}\n'), done.stderr


def test_without_a_gpu_nothing_is_run_and_one_line_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    cases, rows = tmp_path / "cases.jsonl", tmp_path / "rows.jsonl"
    cases.write_text(json.dumps(CASES[0] | {"device": "cuda"}) + "\n")
    done = run_many(sys.executable, cases, rows)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("device=cuda: torch sees no CUDA GPU")
    assert done.stderr.count("\n") == 1
    assert not rows.exists()
