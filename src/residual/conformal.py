"""A one-sided upper bound by split conformal prediction, on log(measured / estimated).

Scores come from rows that the estimate was not fitted on; for exchangeable rows the bound then
holds for the asked share of new ones, whatever the error's distribution (Vovk, Gammerman and
Shafer, Algorithmic Learning in a Random World; Angelopoulos and Bates, arXiv 2107.07511).
"""

from __future__ import annotations

from math import ceil, floor, inf

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
    rank = ceil((len(scores) + 1) * coverage - _ROUNDING)
    if rank > len(scores):
        return inf
    return float(np.sort(scores)[rank - 1])


def binomial_tail(hits: int, count: int, share: float) -> float:
    """Probability of `hits` or more of `count`, each with probability `share`."""
    from scipy.stats import binom

    assert floor(hits) == hits
    return float(binom.sf(hits - 1, count, share))
