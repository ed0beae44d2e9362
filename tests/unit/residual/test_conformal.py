"""The upper bound: exact ranks, coverage over many seeds, and MAPIE as an oracle."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from mapie.conformity_scores import AbsoluteConformityScore
from mapie.regression import SplitConformalRegressor
from sklearn.dummy import DummyRegressor

from src.errors import UserError
from src.residual.conformal import exceedance_tail, log_margin, rows_needed
from src.residual.evaluate import bound


def test_the_fewest_rows() -> None:
    assert rows_needed(0.95) == 19
    assert rows_needed(0.9) == 9
    assert rows_needed(0.5) == 1


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_bound_is_finite_from_the_fewest_rows_on(coverage: float) -> None:
    count = rows_needed(coverage)
    scores = np.arange(count, dtype=float)
    assert log_margin(scores, coverage) == count - 1
    assert log_margin(scores[1:], coverage) == inf


@pytest.mark.parametrize("coverage", [0.0, 1.0, -1.0, 1.5, float("nan")])
def test_other_coverages_are_refused(coverage: float) -> None:
    with pytest.raises(UserError, match=r"residual\.coverage="):
        log_margin(np.zeros(3), coverage)


@pytest.mark.parametrize(("coverage", "count"), [(0.95, 19), (0.95, 60), (0.9, 33), (0.8, 200)])
def test_coverage_over_many_seeds(coverage: float, count: int) -> None:
    """Over draws of scores and of a new row, the bound holds with the asked probability."""
    rng = np.random.default_rng(7)
    draws = 4000
    scores = rng.standard_t(3, size=(draws, count))
    fresh = rng.standard_t(3, size=draws)
    margins = np.array([log_margin(one, coverage) for one in scores])
    exact = np.ceil((count + 1) * coverage - 1e-9) / (count + 1)
    assert (fresh <= margins).mean() == pytest.approx(exact, abs=4 * (0.25 / draws) ** 0.5)
    assert exact >= coverage


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_margin_as_mapies(coverage: float, seed: int) -> None:
    """MAPIE's split conformal interval around 0 of positive scores ends at the same rank."""
    scores = np.abs(np.random.default_rng(seed).normal(size=57))
    blank = np.zeros((57, 1))
    zero = DummyRegressor(strategy="constant", constant=0.0).fit(blank, scores)
    oracle = SplitConformalRegressor(
        zero, confidence_level=coverage, conformity_score=AbsoluteConformityScore(), prefit=True
    )
    oracle.conformalize(blank, scores)
    _, intervals = oracle.predict_interval(np.zeros((1, 1)))
    assert log_margin(scores, coverage) == pytest.approx(intervals[0, 1, 0], abs=1e-12)


def test_how_a_bound_would_have_held_is_told_family_by_family() -> None:
    rng = np.random.default_rng(3)
    families = [f"family{number % 5}" for number in range(2000)]
    found = bound(rng.normal(size=2000), families, 0.95)
    assert found.rows == 2000
    assert found.tried == 2000
    assert found.held / 2000 == pytest.approx(0.95, abs=0.02)
    # One family is always underestimated: no bound that has not seen it holds for it.
    errors = rng.normal(size=2000) - np.array([100.0 * (one == "family0") for one in families])
    assert bound(errors, families, 0.95).held / 2000 == pytest.approx(0.8, abs=0.02)


def test_too_few_rows_have_no_bound() -> None:
    found = bound(np.zeros(18), ["one", "other"] * 9, 0.95)
    assert not found.is_finite
    assert (found.tried, found.held) == (0, 0)


def test_exceedances_of_fresh_rows_over_many_seeds() -> None:
    """The tail is a p-value: it is small as seldom as it says, however few the bound's rows."""
    rng = np.random.default_rng(5)
    tails = []
    for _ in range(2000):
        margin = log_margin(rng.normal(size=40), 0.9)
        beyond = int((rng.normal(size=25) > margin).sum())
        tails.append(exceedance_tail(beyond, 25, 40, 0.9))
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(tails) <= level) <= level + 3 * (level / 2000) ** 0.5
    assert exceedance_tail(0, 25, 40, 0.9) == 1.0
    assert exceedance_tail(25, 25, 40, 0.9) < 1e-6
