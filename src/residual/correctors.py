"""Corrections of the formula, from none to trees: what each answers, and how it is fitted.

Every one answers log(corrected / formula) at one level; the simplest that is good enough wins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy as np

from src.residual.facts import Array, Table
from src.units import GIB


class Kind(StrEnum):
    """The kinds of correction, the simplest first.

    `formula`: none; `constant`: one ratio; `ridge`: a linear function of the features; `allocator`:
    what a caching allocator holds beyond the tensors, and what libraries put outside it; `trees`:
    LightGBM on the formula's error; `allocator+trees`: LightGBM on what `allocator` leaves.
    """

    FORMULA = "formula"
    CONSTANT = "constant"
    RIDGE = "ridge"
    ALLOCATOR = "allocator"
    TREES = "trees"
    ALLOCATOR_TREES = "allocator+trees"

    @property
    def has_trees(self) -> bool:
        """Whether LightGBM answers."""
        return self in (Kind.TREES, Kind.ALLOCATOR_TREES)

    def knows(self, level: str) -> bool:
        """Whether there is such a correction at a level: an allocator has no say in `allocated`."""
        has_allocator = self in (Kind.ALLOCATOR, Kind.ALLOCATOR_TREES)
        return not has_allocator or level != "allocated"


class Corrector(Protocol):
    """A fitted correction of one level."""

    @property
    def kind(self) -> Kind:
        """Its kind."""

    def log_ratio(self, table: Table, allocated: Array, /) -> Array:
        """log(corrected / formula), of shape (n,).

        Args:
            table: the facts of n steps.
            allocated: their allocated bytes, corrected or measured, of shape (n,).
        """

    def parameters(self) -> dict[str, Any]:
        """What was fitted, as plain JSON values; trees are kept apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One ratio for all; with 0 it is the formula itself.

    Attributes:
        log: log(measured / formula).
    """

    log: float = 0.0

    @property
    def kind(self) -> Kind:
        """`formula` where it changes nothing."""
        return Kind.CONSTANT if self.log else Kind.FORMULA

    def log_ratio(self, _: Table, allocated: Array, /) -> Array:
        """The same for all."""
        return np.full_like(allocated, self.log)

    def parameters(self) -> dict[str, Any]:
        """The ratio's logarithm."""
        return {"log": self.log}

    @classmethod
    def fit(cls, log_ratios: Array) -> Self:
        """The median ratio."""
        return cls(log=float(np.median(log_ratios)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ridge:
    """A linear function of the features.

    Attributes:
        weights: one for each feature as it stands; 0 for what did not vary.
        intercept: the rest.
    """

    weights: tuple[float, ...]
    intercept: float

    @property
    def kind(self) -> Kind:
        """`ridge`."""
        return Kind.RIDGE

    def log_ratio(self, table: Table, _: Array, /) -> Array:
        """The function's values."""
        values: Array = table.features @ np.array(self.weights) + self.intercept
        return values

    def parameters(self) -> dict[str, Any]:
        """Weights and intercept."""
        return asdict(self)

    @classmethod
    def fit(cls, features: Array, log_ratios: Array, *, penalty: float) -> Self:
        """Least squares on standardised features, the penalty on each weight.

        Args:
            features: of shape (n, number of features).
            log_ratios: of shape (n,).
            penalty: how many rows a weight of 1 has to be worth.
        """
        mean, spread = features.mean(axis=0), features.std(axis=0)
        scale = np.where(spread > 0, spread, np.inf)
        scaled = (features - mean) / scale
        centre = float(log_ratios.mean())
        gram = scaled.T @ scaled + penalty * np.eye(features.shape[1])
        weights = np.linalg.solve(gram, scaled.T @ (log_ratios - centre)) / scale
        return cls(weights=tuple(weights.tolist()), intercept=centre - float(mean @ weights))


LEAST_SLACK = 0.015
"""Share of allocated that fragmentation costs even once the allocator has given its cache back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocator:
    """What the caching allocator holds beyond the tensors, and what lies outside it.

    reserved = min(allocated + slack, max(allocated * (1 + LEAST_SLACK), capacity - outside)), since
    the cache is given back before the card is full. On one stream slack is made of blocks of the
    loss that nothing fits in again; on several, blocks freed on one stream wait for the others, so
    that instants do not share what they could. device = reserved + outside.

    Attributes:
        level: `reserved` or `device`.
        libraries_bytes: kernels of libraries, beside CUDA's context and NCCL.
        loss_blocks: blocks of the loss that stay unused, on one stream.
        unshared: part of what instants could share and do not, on several streams.
        fragmentation: share of allocated that is lost besides.
    """

    level: str
    libraries_bytes: float
    loss_blocks: float
    unshared: float
    fragmentation: float

    @property
    def kind(self) -> Kind:
        """`allocator`."""
        return Kind.ALLOCATOR

    def size(self, table: Table, allocated: Array) -> Array:
        """Bytes at its level, of shape (n,)."""
        outside = table.outside + self.libraries_bytes
        several = table.has_several_streams
        slack = (
            (1 - several) * self.loss_blocks * table.loss_block
            + several * self.unshared * table.unshared
            + self.fragmentation * allocated
        )
        least = allocated * (1 + LEAST_SLACK)
        reserved = np.minimum(
            np.maximum(allocated + slack, least), np.maximum(least, table.capacity - outside)
        )
        return reserved if self.level == "reserved" else reserved + outside

    def log_ratio(self, table: Table, allocated: Array, /) -> Array:
        """log(its bytes / the formula's)."""
        ratio: Array = np.log(self.size(table, allocated) / table.formula[self.level])
        return ratio

    def parameters(self) -> dict[str, Any]:
        """The four that were fitted."""
        plain = asdict(self)
        del plain["level"]
        return plain

    @classmethod
    def fit(cls, table: Table, allocated: Array, measured: Array, *, level: str) -> Self:
        """The least mean error (Huber's, from 5 %), drawn a little to what is known beforehand.

        Args:
            table: the facts of n steps.
            allocated: their allocated bytes, of shape (n,).
            measured: what was measured at `level`, of shape (n,).
            level: `reserved` or `device`.
        """
        from scipy.optimize import minimize

        def of(point: Array) -> Allocator:
            return _allocator(np.abs(point), level)

        def loss(point: Array) -> float:
            error = np.log(of(point).size(table, allocated) / measured)
            huber = HUBER_FROM**2 * (np.sqrt(1 + (error / HUBER_FROM) ** 2) - 1)
            return float(huber.mean() / HUBER_FROM + PRIOR_WEIGHT * np.square(point - 1).mean())

        starts = (np.full(4, 1.0), np.full(4, 0.4), np.full(4, 2.0))
        options = {"adaptive": True, "maxiter": 2000, "xatol": 1e-3, "fatol": 1e-7}
        found = [minimize(loss, start, method="Nelder-Mead", options=options) for start in starts]
        best = min(found, key=lambda one: float(one.fun))
        return cls(**asdict(of(best.x)))


HUBER_FROM = 0.05
PRIOR_WEIGHT = 1e-3
PRIOR = (GIB, 1.0, 0.7, 0.01)
"""Libraries' bytes, loss blocks, unshared part and fragmentation where no row speaks of them."""


def _allocator(scales: Array, level: str) -> Allocator:
    libraries, blocks, unshared, fragmentation = (
        float(scale) * prior for scale, prior in zip(scales, PRIOR, strict=True)
    )
    return Allocator(
        level=level,
        libraries_bytes=libraries,
        loss_blocks=blocks,
        unshared=unshared,
        fragmentation=fragmentation,
    )
