"""What is learned: the right kind, no more than the rows say, the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from src.errors import UserError
from src.memory import estimate_step
from src.record import Row
from src.residual.champion import Champion
from src.residual.correctors import Kind
from src.residual.dataset import Dataset
from src.residual.estimator import Calibrated
from src.residual.evaluate import Score, folds, score
from src.residual.files import champion_files
from src.residual.options import Options
from src.residual.training import Training, choose, train
from src.residual.trees import TreeOptions
from tests.calibration_rows import ORIGIN, TRUTH, dataset_of, rows_of, steps

OPTIONS = Options()
QUICK = Options(kinds=(Kind.ALLOCATOR_TREES,), trees=TreeOptions(rounds=20))
PLAIN = dataset_of(rows_of(steps(90)))


@pytest.fixture(scope="module")
def plain() -> Training:
    return train(PLAIN, OPTIONS, ORIGIN)


def test_an_exact_formula_is_left_alone(plain: Training) -> None:
    assert plain.levels["allocated"].kind is Kind.FORMULA


def test_an_allocators_parameters_are_found_again(plain: Training) -> None:
    for level in ("reserved", "device"):
        result = plain.levels[level]
        assert result.kind is Kind.ALLOCATOR
        found = result.corrector.parameters()
        for name in ("loss_blocks", "unshared"):
            assert found[name] == pytest.approx(TRUTH[name], rel=0.15)
        assert result.scores["family"][Kind.ALLOCATOR].median < 0.012


def test_the_winner_beats_every_baseline_on_families_left_out(plain: Training) -> None:
    for level in ("reserved", "device"):
        scores = plain.levels[level].scores["family"]
        best = scores[plain.levels[level].kind].mean
        for kind in (Kind.FORMULA, Kind.CONSTANT, Kind.RIDGE):
            assert best < scores[kind].mean


def test_the_bound_holds_for_families_left_out(plain: Training) -> None:
    for level in ("allocated", "reserved", "device"):
        assert plain.levels[level].bound.is_finite
        found = plain.levels[level].bound
        assert found.held / found.tried == pytest.approx(0.95, abs=0.05)


def test_training_is_deterministic() -> None:
    rows = rows_of(steps(90))[:40]
    forward, backward = (
        train(dataset_of(rows), QUICK, ORIGIN),
        train(dataset_of(rows[::-1]), QUICK, ORIGIN),
    )
    assert champion_files(forward.champion) == champion_files(backward.champion)


@pytest.mark.parametrize(
    ("count", "words"),
    [(11, "19 more rows are missing"), (0, "30 more rows and rows of 3 more model families")],
)
def test_too_few_rows_say_how_many_are_missing(count: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(dataset_of(rows_of(steps(90))[:count]), OPTIONS, ORIGIN)


def test_too_few_families_are_not_enough() -> None:
    only = [
        row for row in rows_of(steps(300)) if row.case["model"]["config"]["model_type"] == "opt"
    ]
    assert len(only) >= OPTIONS.min_rows
    with pytest.raises(UserError, match="rows of 2 more model families"):
        train(dataset_of(only), OPTIONS, ORIGIN)


SIMPLE = replace(OPTIONS, kinds=(Kind.CONSTANT, Kind.ALLOCATOR))


def without(level: str, row: Row) -> Row:
    return replace(
        row, peak_bytes={key: size for key, size in row.peak_bytes.items() if key != level}
    )


def test_reserved_follows_the_device_level_where_no_row_states_it() -> None:
    rows = [without("reserved", row) for row in rows_of(steps(60))]
    result = train(dataset_of(rows), SIMPLE, ORIGIN)
    reserved, device = result.levels["reserved"], result.levels["device"]
    assert reserved.kind is device.kind is Kind.ALLOCATOR
    assert reserved.corrector.parameters() == device.corrector.parameters()
    assert not reserved.bound.is_finite
    assert "as at the device level" in reserved.reason
    for sample in dataset_of(rows).samples:
        corrected = result.champion.correct(sample.facts).peak_bytes
        outside = sample.facts.outside + device.corrector.parameters()["libraries_bytes"]
        assert corrected.device - corrected.reserved == pytest.approx(outside, rel=0.01)


def test_a_level_that_few_rows_state_stays_the_formulas() -> None:
    rows = rows_of(steps(60))
    thin = [
        row if number < 10 else replace(row, peak_bytes={"allocated": row.peak_bytes["allocated"]})
        for number, row in enumerate(rows)
    ]
    result = train(dataset_of(thin), SIMPLE, ORIGIN)
    for level in ("reserved", "device"):
        assert result.levels[level].kind is Kind.FORMULA
        assert not result.levels[level].bound.is_finite
        assert result.champion.levels[level].log_margin is None
    assert "10 rows of" in result.levels["device"].reason


NEW = "h200"


def shifted(count: int) -> list[Row]:
    """Rows of another GPU, 12 % higher at every level."""
    return rows_of(steps(count, sku=NEW, seed=1), seed=5, bend=lambda _: 1.12)


def signed_errors(champion: Champion, rows: list[Row], level: str) -> np.ndarray:
    calibrated = Calibrated(champion)
    dataset = dataset_of(rows)
    assert len(dataset.samples) == len(rows)
    ratios = [
        getattr(champion.correct(sample.facts).peak_bytes, level) / sample.measured[level]
        for sample in dataset.samples
    ]
    assert calibrated.champion is champion
    return np.array(ratios) - 1


def test_a_planted_shift_is_learned_from_forty_rows_and_spoils_nothing(plain: Training) -> None:
    old, new = rows_of(steps(90)), shifted(80)
    taught = train(dataset_of([*old, *new[:40]]), OPTIONS, ORIGIN).champion
    for level in ("allocated", "device"):
        before = np.median(np.abs(signed_errors(plain.champion, old, level)))
        after = np.median(np.abs(signed_errors(taught, old, level)))
        assert after <= before + 0.005
        untaught = np.median(signed_errors(plain.champion, new[40:], level))
        assert untaught < -0.08
        assert abs(np.median(signed_errors(taught, new[40:], level))) <= 0.03


def test_outside_the_hull_the_formula_answers_with_a_wider_bound(plain: Training) -> None:
    calibrated = Calibrated(plain.champion)
    step = steps(90)[0]
    far = replace(step, micro_batch=step.micro_batch * 64, job=replace(step.job, seq_len=2048))
    assert calibrated.in_range([step])
    assert not calibrated.in_range([step, far])
    assert calibrated(step).notes == estimate_step(step).notes
    answer, formula = calibrated(far), estimate_step(far)
    assert answer.peak_bytes == formula.peak_bytes
    assert answer.upper_bytes.device >= formula.upper_bytes.device
    assert any("outside what was calibrated on" in note for note in answer.notes)
    assert calibrated(step).ledger == estimate_step(step).ledger


def test_levels_rise_and_bounds_lie_above(plain: Training) -> None:
    calibrated = Calibrated(plain.champion)
    for step in (*steps(90)[:20], *steps(20, sku=NEW, seed=3)):
        peak, upper = calibrated(step).peak_bytes, calibrated(step).upper_bytes
        assert peak.allocated <= peak.reserved <= peak.device
        assert upper.allocated <= upper.reserved <= upper.device
        for level in ("allocated", "reserved", "device"):
            assert getattr(peak, level) <= getattr(upper, level)


def of_mean(mean: float) -> Score:
    return Score(rows=9, groups=3, signed=0, median=mean, mean=mean, p95=mean, worst_under=0)


def test_the_simplest_good_correction_is_chosen() -> None:
    means = {Kind.FORMULA: 0.10, Kind.CONSTANT: 0.05, Kind.RIDGE: 0.0495, Kind.TREES: 0.0499}
    assert choose({kind: of_mean(mean) for kind, mean in means.items()})[0] is Kind.CONSTANT
    means[Kind.TREES] = 0.03
    assert choose({kind: of_mean(mean) for kind, mean in means.items()})[0] is Kind.TREES
    means = {Kind.FORMULA: 0.01, Kind.CONSTANT: 0.0099}
    assert choose({kind: of_mean(mean) for kind, mean in means.items()})[0] is Kind.FORMULA


@pytest.mark.parametrize("num_groups", [2, 5, 14])
def test_groups_are_left_out_whole_and_each_once(num_groups: int) -> None:
    labels = [f"group{number % num_groups}" for number in range(60)]
    seen = np.zeros(60, dtype=int)
    for fitted, left_out in folds(labels):
        assert not (fitted & left_out).any()
        inside = {label for label, here in zip(labels, left_out, strict=True) if here}
        assert not inside & {label for label, here in zip(labels, fitted, strict=True) if here}
        seen += left_out
    assert (seen == 1).all()


def test_one_group_cannot_be_left_out() -> None:
    assert list(folds(["one"] * 5)) == []


def test_scores_are_shares_of_what_was_measured() -> None:
    found = score(np.log([1.1, 0.8, 1.0]), ["a", "a", "b"])
    assert (found.rows, found.groups) == (3, 2)
    assert found.signed == pytest.approx(0.0)
    assert found.median == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.1)
    assert found.worst_under == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"coverage": 1.0}, "coverage"),
        ({"min_rows": 0}, "min_rows"),
        ({"min_families": 1}, "min_families"),
        ({"ridge_penalty": 0.0}, "ridge_penalty"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], key: str) -> None:
    with pytest.raises(UserError, match=rf"residual\.{key}="):
        Options(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"leaves": 1},
        {"learning_rate": 0.0},
        {"min_rows_per_leaf": 0},
        {"l2": -1.0},
        {"l2": float("nan")},
    ],
)
def test_tree_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"residual\.trees\."):
        TreeOptions(**options)  # type: ignore[arg-type]


def test_duplicates_do_not_count() -> None:
    rows = rows_of(steps(90))[:20]
    doubled: Dataset = dataset_of([*rows, *rows])
    with pytest.raises(UserError, match="10 more rows are missing"):
        train(doubled, OPTIONS, ORIGIN)
