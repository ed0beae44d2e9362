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
        measured: bytes at the level that estimates are compared with, NaN where there are none.
        stated: the same where nothing is compared but slack can be learned from, too.
        allocated: what the correction may take as allocated bytes: measured where that is known.
        estimated: what it will be given when it answers: the formula's, corrected.
    """

    level: str
    table: Table
    measured: Array
    stated: Array
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
    if kind is Kind.ALLOCATOR:
        known = train & ~np.isnan(rows.stated)
        facts, allocated = rows.table.take(known), rows.allocated[known]
        return Allocator.fit(facts, allocated, rows.stated[known], level=rows.level)
    chosen = train & rows.is_known
    table, measured = rows.table.take(chosen), rows.measured[chosen]
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
    allocator = fit(Kind.ALLOCATOR, rows, train, options)
    assert isinstance(allocator, Allocator)
    rest = log_ratios - allocator.log_ratio(table, rows.allocated[chosen])
    return fit_trees(table, rest, level=rows.level, base=allocator, options=options.trees)
