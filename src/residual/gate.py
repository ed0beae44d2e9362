"""Whether a candidate takes the champion's place, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from src.record import LEVELS
from src.residual.champion import Champion
from src.residual.correctors import Kind
from src.residual.dataset import Dataset
from src.residual.evaluate import left_out_log_ratios
from src.residual.facts import Array
from src.residual.fitting import LevelRows
from src.residual.options import Options
from src.residual.training import GAIN, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the gate says.

    Attributes:
        is_better: whether the candidate becomes champion.
        reasons: why, level by level.
    """

    is_better: bool
    reasons: tuple[str, ...]


def decide(
    dataset: Dataset, training: Training, champion: Champion | None, options: Options
) -> Decision:
    """Compare on the families left out: with the formula, one constant ratio, and the champion.

    The champion's kinds of correction are fitted again to those of its rows that the dataset has,
    each family left out in turn, so that neither side has seen what it is judged by.
    """
    fitted = {level: one for level, one in training.levels.items() if one.is_judged}
    reasons = [f"{level}: {one.kind.value} ({one.reason})" for level, one in fitted.items()]
    if not fitted:
        return Decision(is_better=False, reasons=("no level has rows enough",))
    if all(one.kind is Kind.FORMULA for one in fitted.values()):
        reasons.append("nothing is better than the formula: no correction")
        return Decision(is_better=False, reasons=tuple(reasons))
    if champion is None:
        return Decision(is_better=True, reasons=(*reasons, "there is no champion yet"))
    mine, theirs = _means(dataset, training, champion, options)
    means = ", ".join(f"{level} {mine[level]:.2%} against {theirs[level]:.2%}" for level in mine)
    is_better = sum(mine.values()) < sum(theirs.values()) * (1 - GAIN)
    words = "better than" if is_better else "not better than"
    reasons.append(f"{words} the champion on families left out: mean error {means}")
    return Decision(is_better=is_better, reasons=tuple(reasons))


def _means(
    dataset: Dataset, training: Training, champion: Champion, options: Options
) -> tuple[dict[str, float], dict[str, float]]:
    """Level -> mean absolute log error of the candidate, and of the champion, on the same rows."""
    trained = dataset.only(champion.origin.row_ids)
    families = dataset.labels("family")
    estimated: Array = dataset.table.formula["allocated"]
    known = estimated
    mine: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for level in LEVELS:
        result = training.levels[level]
        rows = LevelRows(
            level=level,
            table=dataset.table,
            measured=dataset.measured(level),
            stated=dataset.stated(level),
            allocated=known,
            estimated=estimated,
        )
        kind = champion.levels[level].corrector.kind
        ratios = left_out_log_ratios(kind, rows, families, options, trained=trained)
        as_it_is = champion.log_ratios(dataset.table)[level]
        ratios = np.where(np.isnan(ratios), as_it_is, ratios)
        if level == "allocated":
            estimated = estimated * np.exp(ratios)
            stated = dataset.stated("allocated")
            known = np.where(np.isnan(stated), estimated, stated)
        if result.is_judged:
            mine[level] = float(np.nanmean(np.abs(result.errors)))
            theirs[level] = float(np.nanmean(np.abs(rows.error(ratios))))
    return mine, theirs
