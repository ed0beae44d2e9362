"""How far off a correction is on what it was not fitted on: whole groups of rows left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, inf

import numpy as np

from src.residual.conformal import log_margin
from src.residual.correctors import Kind
from src.residual.facts import Array
from src.residual.fitting import LevelRows, Mask, fit
from src.residual.options import Options

MOST_FOLDS = 6
"""Groups beyond that many are left out several at a time."""

GROUPS = ("family", "method", "gpu")
"""What is left out as a whole, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Errors of one correction on rows left out, as shares of what was measured.

    Attributes:
        rows: how many were compared.
        groups: in how many groups.
        signed: the median error; below 0: too little was estimated.
        median: of the absolute error.
        mean: of the absolute error; what corrections are chosen by.
        p95: 95th percentile of the absolute error.
        worst_under: the largest under-prediction, 0 or less.
    """

    rows: int
    groups: int
    signed: float
    median: float
    mean: float
    p95: float
    worst_under: float

    def to_json(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)


def score(errors: Array, labels: Sequence[str]) -> Score:
    """The score of log errors, of shape (n,), n at least 1, whose rows are in these groups."""
    shares = np.expm1(errors)
    absolute = np.abs(shares)
    return Score(
        rows=len(errors),
        groups=len(set(labels)),
        signed=float(np.median(shares)),
        median=float(np.median(absolute)),
        mean=float(absolute.mean()),
        p95=float(np.quantile(absolute, 0.95)),
        worst_under=min(0.0, float(shares.min())),
    )


def folds(labels: Sequence[str]) -> Iterator[tuple[Mask, Mask]]:
    """Masks (fitted on, left out), of shape (n,), that part no group.

    None where there is only one group. Up to `MOST_FOLDS` groups are left out one by one, more of
    them several at a time.
    """
    from sklearn.model_selection import GroupKFold, LeaveOneGroupOut

    num_groups = len(set(labels))
    if num_groups < 2:
        return
    is_few = num_groups <= MOST_FOLDS
    splitter = LeaveOneGroupOut() if is_few else GroupKFold(n_splits=MOST_FOLDS)
    blank = np.zeros((len(labels), 1))
    for _, left_out in splitter.split(blank, groups=labels):
        mask = np.zeros(len(labels), dtype=np.bool_)
        mask[left_out] = True
        yield ~mask, mask


def left_out_log_ratios(
    kind: Kind,
    rows: LevelRows,
    labels: Sequence[str],
    options: Options,
    *,
    trained: Mask | None = None,
) -> Array:
    """log(corrected / formula) of every row by a correction that has not seen its group.

    Of shape (n,); NaN where the other groups have no measured row.

    Args:
        kind: the kind.
        rows: the level's rows.
        labels: the group of each.
        options: how the correction is fitted.
        trained: rows that may be fitted on at all; None: all.
    """
    found = np.full(len(labels), np.nan)
    for fitted, left_out in folds(labels):
        allowed = fitted if trained is None else fitted & trained
        if not (allowed & rows.is_known).any():
            continue
        corrector = fit(kind, rows, allowed, options)
        found[left_out] = corrector.log_ratio(rows.table.take(left_out), rows.estimated[left_out])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The upper bound of one level.

    Attributes:
        log_margin: added to the logarithm of the estimate; infinity: there is none.
        rows: the scores it rests on.
        tried: rows that could be held against a bound from 19 or more of other families' scores.
        held: how many of those lay below it.
    """

    log_margin: float
    rows: int
    tried: int
    held: int

    @property
    def is_finite(self) -> bool:
        """Whether there is a bound."""
        return self.log_margin < inf

    @property
    def margin(self) -> float:
        """The bound above the estimate, as a share of it."""
        return exp(self.log_margin) - 1


def bound(errors: Array, families: Sequence[str], coverage: float) -> Bound:
    """The bound from left-out log errors, and how it would have held family by family.

    Args:
        errors: log(estimated / measured), NaN where there is none; of shape (n,).
        families: of shape (n,).
        coverage: the share of rows for which it has to hold.
    """
    known = ~np.isnan(errors)
    scores, labels = -errors[known], np.array(families, dtype=object)[known]
    held: list[bool] = []
    for family in dict.fromkeys(labels.tolist()):
        mine = labels == family
        margin = log_margin(scores[~mine], coverage)
        if margin < inf:
            held += (scores[mine] <= margin).tolist()
    return Bound(
        log_margin=log_margin(scores, coverage),
        rows=len(scores),
        tried=len(held),
        held=sum(held),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OomScore:
    """Verdicts on rows left out, by the upper bound at device level.

    Attributes:
        oom_rows: rows that ran out of memory.
        recalled: of those, how many are not said to fit.
        warned: rows of all that are not said to fit.
        rows: all of them.
    """

    oom_rows: int
    recalled: int
    warned: int
    rows: int


def oom_score(upper_bytes: Array, capacity: Array, is_oom: Mask) -> OomScore:
    """Verdicts against outcomes; every argument is of shape (n,), unknown bounds NaN."""
    known = ~np.isnan(upper_bytes)
    unfit = known & (upper_bytes > capacity)
    return OomScore(
        oom_rows=int((known & is_oom).sum()),
        recalled=int((unfit & is_oom).sum()),
        warned=int(unfit.sum()),
        rows=int(known.sum()),
    )


def to_table(scores: Mapping[Kind, Score]) -> dict[str, dict[str, float]]:
    """Scores as plain JSON values."""
    return {kind.value: one.to_json() for kind, one in scores.items()}
