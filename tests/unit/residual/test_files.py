"""A champion's folder: whole or not at all, read back exactly, and never trusted blindly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.residual.champion import Champion, LevelModel, Origin
from src.residual.correctors import Allocator, Constant, Ridge
from src.residual.facts import NAMES
from src.residual.files import META, ChampionError, read_champion, write_champion
from src.residual.hull import Hull
from src.residual.trees import TreeOptions, fit_trees
from tests.calibration_rows import ORIGIN, TRUTH, dataset_of, rows_of, steps

DATASET = dataset_of(rows_of(steps(60)))
TABLE = DATASET.table
FORMULA = TABLE.formula["allocated"]


def champion() -> Champion:
    rest = np.log(DATASET.measured("device") / TABLE.formula["device"])
    base = Allocator(level="device", **TRUTH)
    trees = fit_trees(
        TABLE,
        rest - base.log_ratio(TABLE, FORMULA),
        level="device",
        base=base,
        options=TreeOptions(rounds=20),
    )
    weights = tuple(0.001 * index for index in range(len(NAMES)))
    return Champion(
        levels={
            "allocated": LevelModel(corrector=Constant(), log_margin=0.01, bound_rows=60),
            "reserved": LevelModel(
                corrector=Ridge(weights=weights, intercept=0.1), log_margin=None, bound_rows=5
            ),
            "device": LevelModel(corrector=trees, log_margin=0.1, bound_rows=60),
        },
        hull=Hull.of(TABLE.features),
        origin=replace(ORIGIN, row_ids=("a", "b"), urls=("https://example.org",)),
        metrics={"device": {"errors": [0.1, 0.2]}},
    )


CHAMPION = champion()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_champion(CHAMPION, tmp_path / "models" / "residual")
    return tmp_path / "models" / "residual"


def test_written_and_read_back_it_answers_the_same(folder: Path) -> None:
    again = read_champion(folder)
    for sample in DATASET.samples[:20]:
        assert again.correct(sample.facts) == CHAMPION.correct(sample.facts)
    assert again.origin == CHAMPION.origin
    assert again.metrics == CHAMPION.metrics
    assert again.has_trees


def test_the_folder_holds_text_alone(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["device.lightgbm.txt", META]
    for path in folder.iterdir():
        path.read_text("utf-8")
    assert [path.name for path in folder.parent.iterdir()] == ["residual"]


def test_another_champion_takes_its_place_whole(folder: Path) -> None:
    plain = replace(
        CHAMPION,
        levels={
            level: LevelModel(corrector=Constant(), log_margin=None, bound_rows=0)
            for level in CHAMPION.levels
        },
    )
    write_champion(plain, folder)
    assert sorted(path.name for path in folder.iterdir()) == [META]
    assert not read_champion(folder).has_trees
    assert [path.name for path in folder.parent.iterdir()] == ["residual"]


def test_a_write_that_fails_leaves_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_text() for path in folder.iterdir()}
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_champion(CHAMPION, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["residual"]


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        meta = json.loads((folder / META).read_text())
        change(meta)
        (folder / META).write_text(json.dumps(meta))

    return apply


def cut(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])

    return apply


def lightgbm_of_other_features(folder: Path) -> None:
    text = (folder / "device.lightgbm.txt").read_text().replace("log2_tokens", "tokens_log2")
    (folder / "device.lightgbm.txt").write_text(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / META).unlink(), "there is no"),
        (lambda folder: (folder / META).write_text(""), "cannot be read"),
        (lambda folder: (folder / META).write_text("[]"), "damaged or foreign"),
        (lambda folder: (folder / META).write_bytes(b"\x80\x04\x95"), "cannot be read"),
        (cut(META), "cannot be read"),
        (cut("device.lightgbm.txt"), "not the file that belongs to it"),
        (lambda folder: (folder / "device.lightgbm.txt").unlink(), "damaged or foreign"),
        (lightgbm_of_other_features, "not the file that belongs to it"),
        (edit(lambda meta: meta.update(format=2)), "format 2"),
        (edit(lambda meta: meta.update(name="other")), "of other"),
        (edit(lambda meta: meta["features"].reverse()), "in another order"),
        (edit(lambda meta: meta["features"].pop()), "features are others"),
        (edit(lambda meta: meta["levels"].pop("device")), "'device' is missing"),
        (edit(lambda meta: meta["levels"]["device"].update(kind="forest")), "forest"),
        (edit(lambda meta: meta["levels"]["reserved"]["parameters"]["weights"].pop()), "weights"),
        (edit(lambda meta: meta["levels"]["allocated"]["bound"].update(log_margin=-1)), "margin"),
        (edit(lambda meta: meta["levels"]["device"]["trees"].update(file="../x")), "outside"),
        (edit(lambda meta: meta["hull"].update(points=[[1.0]])), "another shape"),
        (edit(lambda meta: meta["origin"].pop("row_ids")), "'row_ids' is missing"),
        (edit(lambda meta: meta["origin"].update(more=1)), "damaged or foreign"),
    ],
)
def test_what_is_damaged_or_foreign_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    with pytest.raises(ChampionError) as caught:
        read_champion(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_trees_with_swapped_columns_are_refused(folder: Path) -> None:
    """The hash fits, and the features of the trees are not those of the program."""
    import hashlib

    path = folder / "device.lightgbm.txt"
    text = path.read_text()
    names = " ".join(NAMES)
    swapped = " ".join([NAMES[1], NAMES[0], *NAMES[2:]])
    assert names in text
    path.write_text(text.replace(names, swapped))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(lambda meta: meta["levels"]["device"]["trees"].update(sha256=digest))(folder)
    with pytest.raises(ChampionError, match="in another order"):
        read_champion(folder)


def test_sources_in_words() -> None:
    origin = Origin(
        created="2026-01-02T03:04:05+00:00",
        row_ids=(),
        rows_hash="",
        sources={"measured": 4, "published": 37},
        families={},
        methods={},
        gpus={},
    )
    assert origin.source == "4 measured, 37 published"
