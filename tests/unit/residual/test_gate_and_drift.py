"""When a candidate takes over, and when fresh rows no longer follow the champion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.residual.champion import Champion
from src.residual.correctors import Kind
from src.residual.dataset import Dataset
from src.residual.drift import FEWEST, LevelDrift, check_drift, names_outside
from src.residual.gate import decide
from src.residual.options import Options
from src.residual.training import Training, train
from src.residual.trees import TreeOptions
from tests.calibration_rows import ORIGIN, dataset_of, rows_of, steps

OPTIONS = Options(kinds=(Kind.CONSTANT, Kind.RIDGE, Kind.ALLOCATOR), trees=TreeOptions(rounds=20))
ROWS = rows_of(steps(90))
DATASET = dataset_of(ROWS)


def trained(dataset: Dataset, options: Options = OPTIONS) -> Training:
    ids = tuple(sample.row_id for sample in dataset.samples)
    return train(dataset, options, replace(ORIGIN, row_ids=ids, options={"coverage": 0.95}))


@pytest.fixture(scope="module")
def plain() -> Training:
    return trained(DATASET)


@pytest.fixture(scope="module")
def champion(plain: Training) -> Champion:
    return plain.champion


def test_the_first_that_is_better_than_the_formula_becomes_champion(plain: Training) -> None:
    decision = decide(DATASET, plain, None, OPTIONS)
    assert decision.is_better
    assert decision.reasons[-1] == "there is no champion yet"
    assert any(reason.startswith("device: allocator") for reason in decision.reasons)


def test_no_correction_is_kept_where_none_helps() -> None:
    exact = [replace(row, peak_bytes=_formula(row)) for row in ROWS]
    dataset = dataset_of(exact)
    decision = decide(dataset, trained(dataset), None, OPTIONS)
    assert not decision.is_better
    assert "nothing is better than the formula" in decision.reasons[-1]


def _formula(row: object) -> dict[str, int]:
    sample = dataset_of([row]).samples[0]  # type: ignore[list-item]
    levels = sample.facts.formula
    return {level: getattr(levels, level) for level in ("allocated", "reserved", "device")}


def test_the_same_rows_do_not_move_the_champion(plain: Training, champion: Champion) -> None:
    decision = decide(DATASET, plain, champion, OPTIONS)
    assert not decision.is_better
    assert "not better than the champion" in decision.reasons[-1]


def test_rows_of_a_new_gpu_move_it(champion: Champion) -> None:
    new = rows_of(steps(60, sku="h200", seed=1), seed=5, bend=lambda _: 1.12)
    dataset = dataset_of([*ROWS, *new])
    options = replace(OPTIONS, kinds=tuple(Kind))
    decision = decide(dataset, trained(dataset, options), champion, options)
    assert decision.is_better
    assert "better than the champion on families left out" in decision.reasons[-1]


def test_too_few_rows_of_every_level_move_nothing(plain: Training) -> None:
    empty = replace(
        plain, levels={level: replace(one, is_judged=False) for level, one in plain.levels.items()}
    )
    assert decide(DATASET, empty, None, OPTIONS).reasons == ("no level has rows enough",)


def drift_of(champion: Champion, count: int, factor: float) -> dict[str, LevelDrift]:
    fresh = rows_of(steps(count, seed=11), seed=9, bend=lambda _: factor)
    return {one.level: one for one in check_drift(champion, dataset_of([*ROWS, *fresh]))}


def test_rows_like_those_before_are_no_drift(champion: Champion) -> None:
    for one in drift_of(champion, 40, 1.0).values():
        assert one.rows == 40
        assert one.drifted is None


@pytest.mark.parametrize("factor", [1.12, 0.9])
def test_a_shift_either_way_is_drift(champion: Champion, factor: float) -> None:
    found = drift_of(champion, 40, factor)
    assert all(one.drifted is not None for one in found.values())
    if factor > 1:
        assert "lie above a bound" in str(found["device"].drifted)
    else:
        assert "off what it was on rows left out" in str(found["device"].drifted)


def test_too_few_fresh_rows_say_nothing(champion: Champion) -> None:
    found = drift_of(champion, FEWEST - 1, 1.5)
    assert found
    assert all(one.drifted is None for one in found.values())


def test_known_rows_are_not_fresh(champion: Champion) -> None:
    assert check_drift(champion, DATASET) == ()


def test_what_lies_outside_is_named(champion: Champion) -> None:
    fresh = rows_of(steps(12, sku="h200", seed=2))
    names = names_outside(champion, dataset_of([*ROWS, *fresh]))
    assert "compute_capability" in names
