"""`src.estimate` with a champion, with a damaged one, and with none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.config.calibration import CHAMPION
from src.estimate import estimate
from src.residual.champion import Champion
from src.residual.correctors import Kind
from src.residual.files import META, write_champion
from src.residual.options import Options
from src.residual.origin import origin_of
from src.residual.training import train
from src.residual.trees import TreeOptions
from src.spec import EstimatorKind
from tests.calibration_rows import dataset_of, rows_of, steps

DATASET = dataset_of(rows_of(steps(60)))
ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = {
    "model": "pythia-160m",
    "gpu": "a100-40gb",
    "method": ["single"],
    "micro_batch": 8,
    "optimizer": "adamw",
}


def champion(*kinds: Kind) -> Champion:
    options = Options(kinds=kinds, trees=TreeOptions(rounds=10))
    return train(DATASET, options, origin_of(DATASET, options)).champion


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "residual"
    write_champion(champion(Kind.ALLOCATOR), place)
    return place


@pytest.mark.parametrize("estimator", ["auto", "calibrated"])
def test_the_champion_answers(folder: Path, estimator: str) -> None:
    report = estimate(**JOB, champion=folder, estimator=estimator)
    formula = estimate(**JOB, estimator="formula")
    assert report.estimator is EstimatorKind.CALIBRATED
    row, plain = report.methods[0], formula.methods[0]
    assert row.peak_bytes.device != plain.peak_bytes.device
    assert row.peak_bytes.allocated == plain.peak_bytes.allocated
    assert row.ledger == plain.ledger
    assert row.upper_bytes.device > row.peak_bytes.device
    assert report.calibration is not None
    assert (report.calibration.rows, report.calibration.source) == (60, "60 measured")
    assert report.calibration.in_range
    assert any("calibrated on 60 rows" in warning for warning in report.warnings)
    assert not any("not calibrated" in warning for warning in report.warnings)
    assert formula.calibration is None


def test_out_of_range_is_said(folder: Path) -> None:
    report = estimate(**{**JOB, "model": "llama-2-7b", "micro_batch": 1}, champion=folder)
    assert report.calibration is not None
    assert not report.calibration.in_range
    assert any("outside what was calibrated on" in note for note in report.methods[0].notes)


def test_verdicts_are_from_the_calibrated_bound(folder: Path) -> None:
    report = estimate(**{**JOB, "micro_batch": None}, champion=folder)
    row = report.methods[0]
    assert row.max_micro_batch == row.micro_batch
    more = estimate(**{**JOB, "micro_batch": row.max_micro_batch + 1}, champion=folder).methods[0]
    assert row.upper_bytes.device <= report.gpu.usable_bytes < more.upper_bytes.device


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign"])
@pytest.mark.parametrize("estimator", ["auto", "calibrated"])
def test_a_file_that_cannot_be_used_is_a_warning_and_the_formula(
    folder: Path, tmp_path: Path, damage: str, estimator: str
) -> None:
    place = tmp_path / "residual"
    if damage != "missing":
        place.mkdir()
        text = (folder / META).read_text()
        changed = text[:1000] if damage == "cut" else text.replace('"format": 1', '"format": 9')
        (place / META).write_text(changed)
    report = estimate(**JOB, champion=place, estimator=estimator)
    assert report.estimator is EstimatorKind.FORMULA
    assert report.methods == estimate(**JOB, estimator="formula").methods
    assert report.calibration is None
    assert any(
        warning.startswith("no calibration, the formula answers alone")
        for warning in report.warnings
    )


def test_the_key_without_effect_is_told(folder: Path) -> None:
    report = estimate(**JOB, champion=folder, estimator="formula")
    assert "champion has no effect with estimator=formula" in report.warnings


def loaded(program: str, *names: str) -> list[str]:
    check = f"{program}\nimport sys; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found: list[str] = json.loads(done.stdout.strip().replace("'", '"'))
    return found


def test_lightgbm_loads_where_trees_answer_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    trees = tmp_path / "residual"
    write_champion(_with_trees(), trees)
    heavy = ("torch", "transformers", "mlflow", "lightgbm")
    asked = {**JOB, "champion": str(folder)}
    program = "from src.estimate import estimate; estimate(**{asked!r})"
    assert loaded(program.format(asked=asked), *heavy) == []
    assert loaded(program.format(asked=asked | {"champion": str(trees)}), *heavy) == ["lightgbm"]
    formula = asked | {"champion": str(trees), "estimator": "formula"}
    assert loaded(program.format(asked=formula), *heavy, "numpy") == []


def _with_trees() -> Champion:
    with_trees = champion(Kind.TREES)
    assert with_trees.has_trees
    return replace(with_trees)


def test_json_tells_what_it_was_calibrated_on(folder: Path) -> None:
    words = ["model=pythia-160m", "gpu=a100-40gb", "method=single", "micro_batch=8", "format=json"]
    done = subprocess.run(
        [sys.executable, "-m", "src.estimate", *words, f"champion={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer = json.loads(done.stdout)
    assert answer["estimator"] == "calibrated"
    assert set(answer["calibration"]) == {"model", "rows", "source", "in_range"}
    assert answer["calibration"]["rows"] == 60


def test_the_projects_champion_lies_where_src_train_puts_it() -> None:
    assert CHAMPION == ROOT / "models" / "residual"


def test_a_step_that_fills_the_card_is_bounded_by_the_card(folder: Path) -> None:
    """The allocator gives its cache back before it fails."""
    report = estimate(**{**JOB, "micro_batch": None}, champion=folder)
    batch = report.methods[0].max_micro_batch
    row = estimate(**{**JOB, "micro_batch": batch}, champion=folder).methods[0]
    assert row.peak_bytes.device < row.upper_bytes.device <= report.gpu.usable_bytes
    over = estimate(**{**JOB, "micro_batch": 4 * batch}, champion=folder).methods[0]
    assert over.verdict.value == "oom"
