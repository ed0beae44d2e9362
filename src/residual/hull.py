"""What rows have been seen: outside it a correction fades away, and the bound widens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from src.residual.facts import FEATURES, NAMES, Array

MOST_POINTS = 256
"""Of the rows that are kept to measure distances from."""

_REACH = np.array([feature.reach for feature in FEATURES])
_NEAREST_AT_LEAST = 0.25
_USUAL = 0.95
"""Of the rows; those that lay further from all others do not stretch what counts as near."""

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a step lies.

    Attributes:
        excess: 0 within the hull, 1 where nothing of the correction is left.
        outside: names of the features that lie outside, the furthest first; `distance` where every
            feature is within and the combination is not.
    """

    excess: float
    outside: tuple[str, ...]

    @property
    def weight(self) -> float:
        """The part of the correction that holds, 1 to 0."""
        return 1.0 - self.excess

    @property
    def in_range(self) -> bool:
        """Whether the whole correction holds."""
        return not self.outside


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Hull:
    """The range of every feature, and points that cover the rows.

    Attributes:
        low, high: of shape (number of features,).
        points: of shape (m, number of features).
        nearest: how far a row usually lay from the others, in reaches.
    """

    low: Array
    high: Array
    points: Array
    nearest: float

    @classmethod
    def of(cls, features: Array) -> Self:
        """The hull of some rows, of shape (n, number of features), n at least 1."""
        unique = np.unique(features, axis=0)
        points = _spread(unique)
        usual = np.quantile([_to_others(points, point) for point in unique], _USUAL)
        thinned = max(float(_distances(points, point).min()) for point in unique)
        return cls(
            low=features.min(axis=0),
            high=features.max(axis=0),
            points=points,
            nearest=max(float(usual), thinned, _NEAREST_AT_LEAST),
        )

    def place(self, features: Array) -> Place:
        """Where a step with these features, of shape (number of features,), lies."""
        beyond = np.maximum(self.low - features, features - self.high) / _REACH
        outside = [NAMES[index] for index in np.argsort(-beyond) if beyond[index] > _ROUNDING]
        excess = max(0.0, float(beyond.max()))
        far = float(_distances(self.points, features).min()) / self.nearest - 1.0
        if far > _ROUNDING and not outside:
            outside = ["distance"]
        return Place(excess=min(1.0, max(excess, far)), outside=tuple(outside))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "nearest": self.nearest,
            "points": self.points.tolist(),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: it is of another form.
        """
        low, high, points = (
            np.array(raw[key], dtype=np.float64) for key in ("low", "high", "points")
        )
        nearest = float(raw["nearest"])
        num = len(FEATURES)
        shapes_fit = low.shape == high.shape == (num,) and points.ndim == 2
        if not shapes_fit or points.shape[1] != num or not len(points) or not nearest > 0:
            raise ValueError("the hull is of another shape")
        return cls(low=low, high=high, points=points, nearest=nearest)


def _distances(points: Array, point: Array) -> Array:
    """Root mean square over the features of the distance in reaches, of shape (m,)."""
    distances: Array = np.sqrt(np.square((points - point) / _REACH).mean(axis=1))
    return distances


def _to_others(points: Array, point: Array) -> float:
    """The distance to the nearest point that is another; 0 where there is none."""
    distances = _distances(points, point)
    others = distances[distances > 0]
    return float(others.min()) if len(others) else 0.0


def _spread(points: Array) -> Array:
    """At most `MOST_POINTS` of the points, each the furthest from those before it."""
    if len(points) <= MOST_POINTS:
        return points
    chosen = [0]
    gaps = _distances(points, points[0])
    while len(chosen) < MOST_POINTS:
        furthest = int(gaps.argmax())
        chosen.append(furthest)
        gaps = np.minimum(gaps, _distances(points, points[furthest]))
    spread: Array = points[np.sort(chosen)]
    return spread
