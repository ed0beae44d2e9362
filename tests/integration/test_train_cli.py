"""`python -m src.train` as a user meets it: rows in, a champion out, and back again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.record import Row, add_rows
from src.residual.files import META, read_champion
from src.train import run as run_train
from tests.calibration_rows import rows_of, steps
from tests.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["residual=no-trees"]
ROWS = rows_of(steps(60))
SHIFTED = rows_of(steps(60, sku="h200", seed=1), seed=5, bend=lambda _: 1.12)


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a folder of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "src.train", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def write(folder: Path, rows: list[Row], name: str = "rows.jsonl") -> Path:
    add_rows(folder / name, rows)
    return folder / name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a champion."""
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, f"rows=[{write(folder, ROWS)}]", "out=residual", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("champion moved")
    return folder


def test_rows_become_a_champion_with_a_card(trained: Path) -> None:
    champion = read_champion(trained / "residual")
    assert len(champion.origin.row_ids) == len(ROWS)
    assert champion.origin.sources == {"measured": len(ROWS)}
    card = (trained / "residual" / "README.md").read_text()
    for words in (
        "60 measured",
        "a100-40gb 60",
        "allocator",
        "| device | family |",
        "torch 2.13.0",
    ):
        assert words in card
    assert {path.name for path in trained.iterdir()} == {"rows.jsonl", "residual"}
    assert not any(path.suffix in (".pkl", ".pickle") for path in trained.rglob("*"))


def test_the_same_rows_again_move_nothing(trained: Path) -> None:
    before = (trained / "residual" / META).read_bytes()
    done = train(trained, f"rows=[{trained / 'rows.jsonl'}]", "out=residual", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "not better than the champion" in done.stdout
    assert done.stdout.rstrip().endswith("champion not moved")
    assert (trained / "residual" / META).read_bytes() == before


def test_fresh_rows_like_those_before_are_no_drift(trained: Path) -> None:
    fresh = write(trained, rows_of(steps(30, seed=11), seed=9), "fresh.jsonl")
    done = train(trained, f"rows=[{fresh}]", "out=residual", "check=true")
    assert done.returncode == 0, done.stderr
    assert "device: 30 fresh rows" in done.stdout
    assert "follows the champion" in done.stdout
    fresh.unlink()


def test_shifted_rows_are_drift_and_retraining_follows(tmp_path: Path) -> None:
    old, new = write(tmp_path, ROWS, "old.jsonl"), write(tmp_path, SHIFTED, "new.jsonl")
    first = train(tmp_path, f"rows=[{old}]", "out=residual", *QUICK)
    assert first.returncode == 0, first.stderr
    drift = train(tmp_path, f"rows=[{new}]", "out=residual", "check=true")
    assert drift.returncode == 3, drift.stderr
    assert "drifted" in drift.stdout
    assert "compute_capability" in drift.stdout
    name = read_champion(tmp_path / "residual").version
    again = train(tmp_path, f"rows=[{old},{new}]", "out=residual", *QUICK)
    assert again.stdout.rstrip().endswith("champion moved"), again.stdout + again.stderr
    newer = read_champion(tmp_path / "residual").version
    assert newer != name
    assert read_champion(tmp_path / "residual-previous").version == name
    back = train(tmp_path, f"rows=[{old}]", "out=residual", "rollback=true")
    assert (back.returncode, back.stdout) == (0, f"champion is {name} again\n")
    assert read_champion(tmp_path / "residual").version == name
    assert read_champion(tmp_path / "residual-previous").version == newer


@pytest.mark.parametrize("count", [1, 29])
def test_too_few_rows_leave_the_champion(trained: Path, count: int) -> None:
    few = write(trained, ROWS[:count], f"few{count}.jsonl")
    before = (trained / "residual" / META).read_bytes()
    done = train(trained, f"rows=[{few}]", "out=residual")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(rf"{30 - count} more rows.* missing", done.stderr)
    assert (trained / "residual" / META).read_bytes() == before
    few.unlink()


def test_damaged_lines_and_unusable_rows_are_told_one_by_one(tmp_path: Path) -> None:
    good = write(tmp_path, ROWS, "rows.jsonl")
    lines = good.read_text().splitlines()
    first = json.loads(lines[0])
    bad = [
        "{cut",
        json.dumps({**first, "schema_version": 99}),
        json.dumps({**first, "peak_bytes": {"allocated": -5}}),
        lines[1].replace('"allocated":', '"allocated":NaN,"x":', 1),
        lines[2],
    ]
    good.write_text("\n".join([*lines, *bad]) + "\n")
    done = train(tmp_path, f"rows=[{good}]", "out=residual", *QUICK)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(bad)
    for words in ("no JSON", "unknown schema version 99", "no number of 0 or more", "twice"):
        assert any(words in line for line in warnings), words
    assert f"{len(ROWS)} rows used" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rows=[nowhere.jsonl]"], "rows=nowhere.jsonl: files that exist"),
        (["sources=simulated"], "simulated rows are never a target"),
        (["sources=guessed"], "sources=guessed"),
        (["gpus=[warp9]"], "gpus=warp9"),
        (["versions=[torch]"], "versions=torch"),
        (["out=/nowhere/at/all"], "out=/nowhere/at/all"),
        (["check=true", "rollback=true"], "rollback=true: without check=true"),
        (["residual=magic"], "residual=magic"),
        (["residual.coverage=1.5"], "residual.coverage=1.5"),
        (["residual.trees.rounds=0"], "residual.trees.rounds=0"),
        (["residual.kinds=[]"], "residual.kinds=[]"),
        (["residual.kinds=forest"], "residual.kinds=forest"),
        (["row=a"], "unknown key"),
        (["rollback=true", "rows=[{rows}]"], "rollback=true: there is no"),
        (["check=true", "rows=[{rows}]"], "check=true: there is no"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    rows = write(tmp_path, ROWS[:2])
    asked = [argument.format(rows=rows) for argument in arguments]
    if not any(argument.startswith("out=") for argument in asked):
        asked.append("out=residual")
    done = run_here(run_train, tmp_path, *asked)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_rows_are_chosen_by_source_gpu_and_version(tmp_path: Path) -> None:
    rows = write(tmp_path, [*ROWS, *SHIFTED])
    done = train(
        tmp_path, f"rows=[{rows}]", "out=residual", "gpus=[h200]", "versions=[torch:2.13]", *QUICK
    )
    assert done.returncode == 0, done.stderr
    assert "60 rows left out by sources, gpus or versions" in done.stderr
    assert read_champion(tmp_path / "residual").origin.gpus == {"h200": 60}
    other = run_here(run_train, tmp_path, f"rows=[{rows}]", "out=other", "versions=[torch:1.]")
    assert other.returncode == 1
    assert "30 more rows" in other.stderr


def test_help_says_every_key(tmp_path: Path) -> None:
    from src.config.train_keys import TRAIN

    done = run_here(run_train, tmp_path, "--help")
    assert done.returncode == 0
    for key in TRAIN.keys:
        assert f"  {key}" in done.stdout
