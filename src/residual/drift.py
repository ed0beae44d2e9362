"""Whether fresh rows still follow the champion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from src.record import LEVELS
from src.residual.champion import Champion
from src.residual.conformal import exceedance_tail
from src.residual.dataset import Dataset, Sample
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
    fresh = fresh_of(champion, dataset)
    corrected = [champion.correct(sample.facts) for sample in fresh]
    found = []
    for level in LEVELS:
        stated = [
            (
                sample.measured[level],
                getattr(one.peak_bytes, level),
                getattr(one.upper_bytes, level),
            )
            for sample, one in zip(fresh, corrected, strict=True)
            if level in sample.measured
        ]
        if stated:
            found.append(_level(champion, level, np.array(stated, dtype=np.float64)))
    return tuple(found)


def fresh_of(champion: Champion, dataset: Dataset) -> tuple[Sample, ...]:
    """The samples that the champion has not seen."""
    known = set(champion.origin.row_ids)
    return tuple(sample for sample in dataset.samples if sample.row_id not in known)


def _level(champion: Champion, level: str, stated: Array) -> LevelDrift:
    """The level's drift from (measured, estimated, upper bound) bytes, of shape (n, 3)."""
    measured, estimated, upper = stated.T
    error = np.log(estimated / measured)
    has_bound = champion.levels[level].log_margin is not None
    beyond = int((measured > upper).sum()) if has_bound else None
    return LevelDrift(
        level=level,
        rows=len(error),
        median=float(np.expm1(np.median(error))),
        beyond=beyond,
        drifted=_reason(champion, level, error, beyond) if len(error) >= FEWEST else None,
    )


def _reason(champion: Champion, level: str, error: Array, beyond: int | None) -> str | None:
    coverage = float(champion.origin.options.get("coverage", 0.95))
    rows = champion.levels[level].bound_rows
    if beyond is not None and exceedance_tail(beyond, len(error), rows, coverage) < UNLIKELY:
        return f"{beyond} of {len(error)} lie above a bound for {coverage:.0%}"
    expected = _expected(champion.metrics, level)
    shift = float(np.median(error)) - float(np.median(expected)) if len(expected) else 0.0
    if abs(shift) > LEAST_SHIFT and _differ(error, expected):
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
    counts: dict[str, int] = {}
    for sample in fresh_of(champion, dataset):
        for name in champion.correct(sample.facts).place.outside:
            counts[name] = counts.get(name, 0) + 1
    known = [*NAMES, "distance"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], known.index(item[0]))))
