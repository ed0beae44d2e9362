"""The champion of this repository: from the rows that lie here, and as good as its card says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from src.measure.case import parse_case
from src.record import Source, read_rows
from src.residual.champion import Champion
from src.residual.correctors import Kind
from src.residual.dataset import Dataset, join
from src.residual.files import read_champion
from src.residual.options import Options
from src.residual.training import Training, train

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "profiling" / "published" / "benchmarks.jsonl"


@pytest.fixture(scope="module")
def champion() -> Champion:
    return read_champion(ROOT / "models" / "residual")


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    found = read_rows(TABLE)
    assert not found.damaged
    return join(found.rows, lambda case: parse_case(case).step)


@pytest.fixture(scope="module")
def again(champion: Champion, dataset: Dataset) -> Training:
    kinds = (Kind.CONSTANT, Kind.RIDGE, Kind.ALLOCATOR)
    return train(dataset, replace(Options(), kinds=kinds), champion.origin)


def test_it_was_learned_from_the_rows_that_lie_here(champion: Champion, dataset: Dataset) -> None:
    assert champion.origin.rows_hash == dataset.rows_hash
    assert set(champion.origin.sources) == {Source.PUBLISHED.value}
    assert all(url.startswith("https://github.com/") for url in champion.origin.urls)


def test_it_is_what_training_gives_today(champion: Champion, again: Training) -> None:
    """The formula has not moved from under it."""
    for level, model in champion.levels.items():
        fresh = again.champion.levels[level]
        assert fresh.corrector.kind is model.corrector.kind
        for name, value in model.corrector.parameters().items():
            assert fresh.corrector.parameters()[name] == pytest.approx(value, rel=0.02), name
        assert (fresh.log_margin or 0.0) == pytest.approx(model.log_margin or 0.0, rel=0.02)
        assert fresh.bound_rows == model.bound_rows


def test_its_bars(again: Training) -> None:
    allocated = again.levels["allocated"].scores["family"][Kind.FORMULA]
    assert allocated.median <= 0.01
    scores = again.levels["device"].scores["family"]
    mine = scores[again.levels["device"].kind]
    assert mine.rows >= 30
    assert mine.median <= 0.05
    assert mine.p95 <= 0.15
    for baseline in (Kind.FORMULA, Kind.CONSTANT, Kind.RIDGE):
        assert mine.mean < scores[baseline].mean
        assert mine.median < scores[baseline].median
        assert mine.p95 < scores[baseline].p95


def test_no_step_that_ran_out_of_memory_is_said_to_fit(again: Training) -> None:
    found = again.oom["champion"]
    assert found.oom_rows == 15
    assert found.recalled == found.oom_rows


def test_no_step_that_left_room_is_said_not_to_fit(champion: Champion, dataset: Dataset) -> None:
    for sample in dataset.samples:
        device = sample.measured.get("device")
        if device is not None and device < 0.85 * sample.facts.capacity:
            corrected = champion.correct(sample.facts)
            assert corrected.upper_bytes.device <= sample.facts.capacity, sample.row_id


def test_its_rows_are_in_range(champion: Champion, dataset: Dataset) -> None:
    places = [
        champion.correct(sample.facts).place for sample in dataset.samples if not sample.is_oom
    ]
    assert all(place.in_range for place in places)
    assert np.mean([place.weight for place in places]) == 1.0


def test_the_card_says_what_the_files_say(champion: Champion) -> None:
    card = (ROOT / "models" / "README.md").read_text("utf-8")
    assert champion.origin.rows_hash in card
    assert champion.origin.created in card
    for family, count in champion.origin.families.items():
        assert f"{family} {count}" in card
