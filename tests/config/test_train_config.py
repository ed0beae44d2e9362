"""Every configuration of `src.train` composes, and its defaults are the program's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from src.config import compose_arguments
from src.config.calibration import CHAMPION
from src.config.train_keys import OPTIONS, TRAIN
from src.config.training import to_training
from src.record import Source
from src.residual.correctors import Kind
from src.residual.options import Options

CONF = Path(__file__).resolve().parents[2] / "conf" / "residual"
FITTED = tuple(kind for kind in Kind if kind is not Kind.FORMULA)


def test_the_files_are_the_options() -> None:
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted(OPTIONS)


def test_defaults_are_those_of_the_specs() -> None:
    asked = to_training(compose_arguments([], TRAIN))
    assert asked.options == replace(Options(), kinds=FITTED)
    assert asked.selection.sources == (Source.MEASURED, Source.PUBLISHED)
    assert (asked.files, asked.check, asked.rollback) == ((), False, False)
    assert asked.folder == CHAMPION
    assert asked.uses_mlflow


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    cfg = compose_arguments([f"residual={option}"], TRAIN)
    asked = to_training(cfg)
    assert set(asked.options.kinds) <= set(FITTED)
    assert any(kind.has_trees for kind in asked.options.kinds) == (option == "default")
    assert OmegaConf.to_yaml(cfg)


def test_values_are_laid_over(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    words = [f"rows=[{rows}]", "sources=published", "gpus=H100-80GB", "versions=[torch:2.13]"]
    words += ["residual.coverage=0.9", "residual.trees.rounds=50", "residual.kinds=[ridge,trees]"]
    asked = to_training(compose_arguments(words, TRAIN))
    assert asked.files == (rows,)
    assert not asked.uses_mlflow
    assert asked.selection.sources == (Source.PUBLISHED,)
    assert asked.selection.gpus == ("h100-80gb",)
    assert asked.selection.versions == {"torch": "2.13"}
    assert asked.options.coverage == 0.9
    assert asked.options.trees.rounds == 50
    assert asked.options.kinds == (Kind.RIDGE, Kind.TREES)
