"""The correction in use: what it answers for a step, and what it was learned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, inf
from typing import Any, Self, TypeVar

import numpy as np

from src.memory.levels import UPPER_OUTSIDE
from src.record import LEVELS
from src.residual.correctors import Corrector
from src.residual.evaluate import Bound
from src.residual.facts import Array, Facts, Table
from src.residual.hull import Hull, Place
from src.units import Levels

ArrayOrFloat = TypeVar("ArrayOrFloat", float, Array)

NAME = "peakcast-residual"

WIDENING = 0.5
"""Part by which a bound's logarithm has grown where nothing of the correction is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a champion was learned from.

    Attributes:
        created: when, ISO 8601 with time zone.
        row_ids: the rows.
        rows_hash: names them all.
        sources, families, methods, gpus: name -> rows.
        urls: where the published ones were published.
        versions: library -> version, of what fitted it.
        row_versions: library -> the versions that the rows ran, sorted.
        options: how it was trained.
    """

    created: str
    row_ids: tuple[str, ...]
    rows_hash: str
    sources: Mapping[str, int]
    families: Mapping[str, int]
    methods: Mapping[str, int]
    gpus: Mapping[str, int]
    urls: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    row_versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The sources in words: `37 published, 4 measured`."""
        return ", ".join(f"{count} {name}" for name, count in self.sources.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelModel:
    """The correction and the bound of one level.

    Attributes:
        corrector: the correction.
        log_margin: of the upper bound, 0 or more; None where there are too few rows for one.
        bound_rows: rows that the bound rests on.
    """

    corrector: Corrector
    log_margin: float | None
    bound_rows: int

    @property
    def libraries_bytes(self) -> float:
        """Bytes that libraries put outside the allocator, as far as the correction knows them."""
        return float(self.corrector.parameters().get("libraries_bytes", 0.0))

    @classmethod
    def of(cls, corrector: Corrector, bound: Bound) -> Self:
        """The model of a correction with its bound."""
        margin = max(0.0, bound.log_margin) if bound.log_margin < inf else None
        return cls(corrector=corrector, log_margin=margin, bound_rows=bound.rows)


def ceiling_bytes(
    formula_upper: ArrayOrFloat, capacity: ArrayOrFloat, scale: ArrayOrFloat, libraries: float
) -> ArrayOrFloat:
    """What the device level cannot go beyond: the card, or all that the step is sure to need.

    The allocator gives its cache back before it fails, down to what the formula's bound counts; so
    a bound from the error of half-full cards says nothing beyond a full one.

    Args:
        formula_upper: the formula's upper bound at device level, in bytes.
        capacity: usable bytes of the GPU.
        scale: upper bound of allocated bytes over the formula's.
        libraries: bytes that libraries put outside the allocator, which the formula leaves out.
    """
    needed: ArrayOrFloat = formula_upper * scale + libraries * (1 + UPPER_OUTSIDE)
    return needed + (capacity - needed) * (capacity > needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """What a champion says of one step.

    Attributes:
        peak_bytes: the corrected peak.
        upper_bytes: its upper bound.
        place: where the step lies with respect to the rows.
    """

    peak_bytes: Levels
    upper_bytes: Levels
    place: Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """A correction for every level.

    Attributes:
        levels: level -> its model.
        hull: what rows were seen.
        origin: what it was learned from.
        metrics: level -> what was found with whole groups of rows left out, as plain JSON values.
        pace: how fast measured steps were, as plain values; empty where none was timed.
    """

    levels: Mapping[str, LevelModel]
    hull: Hull
    origin: Origin
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_trees(self) -> bool:
        """Whether LightGBM answers at any level."""
        return any(model.corrector.kind.has_trees for model in self.levels.values())

    @property
    def version(self) -> str:
        """Names this champion: its rows and its day."""
        return f"{NAME}-{self.origin.rows_hash}"

    def log_ratios(self, table: Table) -> dict[str, Any]:
        """By level, log(corrected / formula) of n steps, whatever the hull; each of shape (n,)."""
        formula = table.formula["allocated"]
        found = {"allocated": self.levels["allocated"].corrector.log_ratio(table, formula)}
        allocated = formula * np.exp(found["allocated"])
        for level in LEVELS[1:]:
            found[level] = self.levels[level].corrector.log_ratio(table, allocated)
        return found

    def correct(self, facts: Facts) -> Corrected:
        """The corrected levels of a step; outside the hull the formula's, with a wider bound."""
        table = Table.of([facts])
        place = self.hull.place(table.features[0])
        ratios = self.log_ratios(table)
        peaks: dict[str, int] = {}
        uppers: dict[str, int] = {}
        for level in LEVELS:
            formula = getattr(facts.formula, level)
            peaks[level] = round(formula * exp(place.weight * float(ratios[level][0])))
        self._put_in_order(peaks)
        for level in LEVELS:
            stated = getattr(facts.upper, level) / getattr(facts.formula, level)
            uppers[level] = round(peaks[level] * self._bound(level, place, stated))
        scale = uppers["allocated"] / facts.upper.allocated
        libraries = self.levels["device"].libraries_bytes
        ceiling = ceiling_bytes(facts.upper.device, facts.capacity, scale, libraries)
        uppers["device"] = min(uppers["device"], max(peaks["device"], round(ceiling)))
        uppers["reserved"] = min(uppers["reserved"], max(peaks["reserved"], uppers["device"]))
        self._put_in_order(uppers)
        return Corrected(peak_bytes=Levels(**peaks), upper_bytes=Levels(**uppers), place=place)

    def _put_in_order(self, sizes: dict[str, int]) -> None:
        """Let levels rise: what was not judged by rows gives way to what was."""
        if self.levels["reserved"].log_margin is None and self.levels["device"].log_margin:
            sizes["reserved"] = min(sizes["reserved"], sizes["device"])
        for below, level in pairwise(LEVELS):
            sizes[level] = max(sizes[level], sizes[below])

    def _bound(self, level: str, place: Place, stated: float) -> float:
        """Upper bound over estimate; outside the hull never below `stated`, the formula's."""
        margin = self.levels[level].log_margin
        if margin is None:
            return max(1.0, stated)
        if place.in_range:
            return exp(margin)
        return max(exp(margin * (1 + WIDENING * place.excess)), stated)
