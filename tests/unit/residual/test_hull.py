"""What was seen, and how a correction fades outside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from src.residual.facts import FEATURES, NAMES
from src.residual.hull import MOST_POINTS, Hull

RNG = np.random.default_rng(0)
SEEN = RNG.uniform(1.0, 3.0, size=(300, len(FEATURES)))
HULL = Hull.of(SEEN)


def test_what_was_seen_is_in_range() -> None:
    for row in SEEN[:50]:
        place = HULL.place(row)
        assert place.in_range
        assert place.weight == 1.0


@pytest.mark.parametrize("name", ["log2_tokens", "fill", "log2_capacity"])
@pytest.mark.parametrize("side", [-1, 1])
def test_beyond_one_feature_it_fades_over_its_reach(name: str, side: int) -> None:
    index = NAMES.index(name)
    reach = FEATURES[index].reach
    edge = (SEEN[:, index].max() if side > 0 else SEEN[:, index].min()).item()
    weights = []
    for part in (0.0, 0.25, 0.5, 1.0, 3.0):
        row = SEEN[0].copy()
        row[index] = edge + side * part * reach
        place = HULL.place(row)
        weights.append(place.weight)
        assert place.outside == ((name,) if part else ())
    assert weights == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0], abs=1e-9)


def test_a_hole_within_every_features_range_is_told() -> None:
    low, high = np.zeros((40, len(FEATURES))), np.ones((40, len(FEATURES)))
    hull = Hull.of(np.vstack([low + RNG.normal(0, 1e-3, low.shape), high]))
    place = hull.place(np.full(len(FEATURES), 0.5))
    assert place.outside == ("distance",)
    assert place.weight < 1.0


def test_many_rows_are_thinned_and_stay_in_range() -> None:
    many = RNG.uniform(0.0, 1.0, size=(MOST_POINTS * 3, len(FEATURES)))
    hull = Hull.of(many)
    assert len(hull.points) == MOST_POINTS
    assert all(hull.place(row).in_range for row in many)


def test_one_row_has_a_hull() -> None:
    hull = Hull.of(SEEN[:1])
    assert hull.place(SEEN[0]).in_range


def test_json_and_back() -> None:
    again = Hull.from_json(json.loads(json.dumps(HULL.to_json())))
    for row in (SEEN[3], SEEN[3] + 0.4):
        assert again.place(row) == HULL.place(row)


@pytest.mark.parametrize(
    "change",
    [
        {"low": [0.0]},
        {"points": []},
        {"points": [[0.0]]},
        {"nearest": 0.0},
        {"nearest": "wide"},
        {"high": "all"},
    ],
)
def test_another_shape_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Hull.from_json({**HULL.to_json(), **change})
