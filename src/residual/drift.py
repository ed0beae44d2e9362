"""Whether fresh rows still follow the champion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from src.record import LEVELS
from src.residual.champion import Champion
from src.residual.conformal import binomial_tail
from src.residual.dataset import Dataset
from src.residual.facts import NAMES, Array

FEWEST = 8
"""Fresh rows of a level below which nothing is said about it."""

LEAST_SHIFT = 0.02
"""A median error that is smaller is no drift, however sure it is."""

UNLIKELY = 0.01
"""Probability below which chance is no explanation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelDrift:
    """Fresh rows of one level.

    Attributes:
        level: the level.
        rows: how many.
        median: the median of estimated / measured - 1.
        beyond: how many lie above their upper bound; None where there is no bound.
        drifted: why they do not follow the champion; None where they do, or are too few to say.
    """

    level: str
    rows: int
    median: float
    beyond: int | None
    drifted: str | None


def check_drift(champion: Champion, dataset: Dataset) -> tuple[LevelDrift, ...]:
    """What fresh rows, those that the champion has not seen, say at each level they state."""
    fresh = ~dataset.only(champion.origin.row_ids)
    table = dataset.table.take(fresh)
    weights = np.array([champion.hull.place(row).weight for row in table.features])
    ratios = champion.log_ratios(table)
    found = []
    for level in LEVELS:
        measured = dataset.measured(level)[fresh]
        error = np.log(table.formula[level] / measured) + weights * ratios[level]
        known = ~np.isnan(error)
        if known.any():
            found.append(_level(champion, level, error[known]))
    return tuple(found)


def _level(champion: Champion, level: str, error: Array) -> LevelDrift:
    model = champion.levels[level]
    beyond = None if model.log_margin is None else int((-error > model.log_margin).sum())
    median = float(np.expm1(np.median(error)))
    return LevelDrift(
        level=level,
        rows=len(error),
        median=median,
        beyond=beyond,
        drifted=_reason(champion, level, error, beyond) if len(error) >= FEWEST else None,
    )


def _reason(champion: Champion, level: str, error: Array, beyond: int | None) -> str | None:
    coverage = float(champion.origin.options.get("coverage", 0.95))
    if beyond is not None and binomial_tail(beyond, len(error), 1 - coverage) < UNLIKELY:
        return f"{beyond} of {len(error)} lie above a bound for {coverage:.0%}"
    expected = _expected(champion.metrics, level)
    shift = float(np.median(error)) - float(np.median(expected)) if len(expected) else 0.0
    if len(expected) and abs(shift) > LEAST_SHIFT and _differ(error, expected):
        return f"the median error is {shift:+.1%} off what it was on rows left out"
    return None


def _expected(metrics: Mapping[str, object], level: str) -> Array:
    """Log errors on rows left out, as they were when the champion was made."""
    of_level = metrics.get(level)
    errors = of_level.get("errors", ()) if isinstance(of_level, Mapping) else ()
    return np.array(errors, dtype=np.float64)


def _differ(fresh: Array, expected: Array) -> bool:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(fresh, expected).pvalue) < UNLIKELY


def names_outside(champion: Champion, dataset: Dataset) -> dict[str, int]:
    """Feature -> fresh rows that lie outside the hull by it, the most frequent first."""
    fresh = ~dataset.only(champion.origin.row_ids)
    counts: dict[str, int] = {}
    for row in dataset.table.take(fresh).features:
        for name in champion.hull.place(row).outside:
            counts[name] = counts.get(name, 0) + 1
    known = [*NAMES, "distance"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], known.index(item[0]))))
