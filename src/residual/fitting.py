"""One level's rows, and each kind of correction fitted to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from src.residual.correctors import Allocator, Constant, Corrector, Kind, Ridge
from src.residual.facts import Array, Table
from src.residual.options import Options
from src.residual.trees import fit_trees

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRows:
    """What one level is fitted to; every column is of shape (n,).

    Attributes:
        level: the level.
        table: the facts of all rows, those that state no peak too.
        measured: bytes at the level, NaN where they are not known.
        allocated: what the correction may take as allocated bytes: measured where that is known.
        estimated: what it will be given when it answers: the formula's, corrected.
    """

    level: str
    table: Table
    measured: Array
    allocated: Array
    estimated: Array

    @property
    def is_known(self) -> Mask:
        """Where the level was measured."""
        return ~np.isnan(self.measured)

    def error(self, log_ratio: Array) -> Array:
        """log(estimated / measured) of a correction, NaN where nothing was measured."""
        error: Array = np.log(self.table.formula[self.level] / self.measured) + log_ratio
        return error


def fit(kind: Kind, rows: LevelRows, train: Mask, options: Options) -> Corrector:
    """The correction of a kind, fitted to the rows of a mask that were measured.

    Args:
        kind: the kind.
        rows: the level's rows.
        train: of shape (n,); at least one row that was measured.
        options: how.
    """
    chosen = train & rows.is_known
    table, measured, allocated = (
        rows.table.take(chosen),
        rows.measured[chosen],
        rows.allocated[chosen],
    )
    log_ratios = np.log(measured / table.formula[rows.level])
    match kind:
        case Kind.FORMULA:
            return Constant()
        case Kind.CONSTANT:
            return Constant.fit(log_ratios)
        case Kind.RIDGE:
            return Ridge.fit(table.features, log_ratios, penalty=options.ridge_penalty)
        case Kind.TREES:
            return fit_trees(table, log_ratios, level=rows.level, base=None, options=options.trees)
    allocator = Allocator.fit(table, allocated, measured, level=rows.level)
    if kind is Kind.ALLOCATOR:
        return allocator
    rest = log_ratios - allocator.log_ratio(table, allocated)
    return fit_trees(table, rest, level=rows.level, base=allocator, options=options.trees)
