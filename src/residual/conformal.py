"""A one-sided upper bound by split conformal prediction, on log(measured / estimated).

Scores come from rows that the estimate was not fitted on; for exchangeable rows the bound then
holds for the asked share of new ones, whatever the error's distribution (Vovk, Gammerman and
Shafer, Algorithmic Learning in a Random World; Angelopoulos and Bates, arXiv 2107.07511).
"""

from __future__ import annotations

from math import ceil, inf

import numpy as np

from src.errors import UserError
from src.residual.facts import Array

_ROUNDING = 1e-9


def check_coverage(coverage: float) -> None:
    """Raise UserError unless a share lies strictly between 0 and 1."""
    if not 0 < coverage < 1:
        raise UserError(key="residual.coverage", value=coverage, allowed="above 0 and below 1")


def rows_needed(coverage: float) -> int:
    """The fewest scores for which there is a finite bound: n >= coverage / (1 - coverage)."""
    check_coverage(coverage)
    return ceil(coverage / (1 - coverage) - _ROUNDING)


def log_margin(scores: Array, coverage: float) -> float:
    """What to add to the logarithm of an estimate; infinity where the scores are too few.

    The ceil((n + 1) * coverage)-th smallest of n scores.

    Args:
        scores: log(measured / estimated) of rows not fitted on, of shape (n,).
        coverage: the share of new rows for which the bound has to hold.
    """
    check_coverage(coverage)
    rank = _rank(len(scores), coverage)
    if rank > len(scores):
        return inf
    return float(np.sort(scores)[rank - 1])


def exceedance_tail(beyond: int, fresh: int, rows: int, coverage: float) -> float:
    """Probability of `beyond` or more of `fresh` rows above a bound, if they are like its rows.

    The share of new rows above a bound of rank k of n scores is Beta(n + 1 - k, k) distributed.

    Args:
        beyond: fresh rows above the bound.
        fresh: fresh rows.
        rows: scores that the bound rests on, `rows_needed` or more.
        coverage: the share for which it has to hold.
    """
    from scipy.stats import betabinom

    rank = _rank(rows, coverage)
    return float(betabinom.sf(beyond - 1, fresh, rows + 1 - rank, rank))


def _rank(rows: int, coverage: float) -> int:
    return ceil((rows + 1) * coverage - _ROUNDING)
