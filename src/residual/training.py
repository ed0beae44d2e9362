"""From a dataset to a champion: every kind of correction judged, the simplest good one kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from src.errors import UserError
from src.record import LEVELS
from src.residual.champion import Champion, LevelModel, Origin, ceiling_bytes
from src.residual.correctors import Allocator, Constant, Corrector, Kind
from src.residual.dataset import Dataset
from src.residual.evaluate import (
    GROUPS,
    Bound,
    OomScore,
    Score,
    bound,
    left_out_log_ratios,
    oom_score,
    score,
    to_table,
)
from src.residual.facts import Array
from src.residual.fitting import LevelRows, fit
from src.residual.hull import Hull
from src.residual.options import Options
from src.residual.trees import Trees

GAIN = 0.02
"""Part of the error that a less simple correction has to take away from a simpler one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelResult:
    """What came of one level.

    Attributes:
        level: the level.
        kind: the correction that was kept.
        corrector: fitted to all rows.
        is_judged: whether there were rows enough to fit anything.
        scores: group -> kind -> errors on rows left out; the formula's alone where not judged.
        bound: the upper bound.
        log_ratios: log(corrected / formula) with families left out, of shape (n,).
        errors: log(estimated / measured) of those, NaN where nothing was measured; of shape (n,).
        reason: why this kind.
    """

    level: str
    kind: Kind
    corrector: Corrector
    is_judged: bool
    scores: Mapping[str, Mapping[Kind, Score]]
    bound: Bound
    log_ratios: Array
    errors: Array
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What came of all levels.

    Attributes:
        champion: the candidate.
        levels: level -> what came of it.
        oom: verdicts by the formula's and by the candidate's upper bound.
    """

    champion: Champion
    levels: Mapping[str, LevelResult]
    oom: Mapping[str, OomScore]


def missing_rows(dataset: Dataset, options: Options) -> str | None:
    """How much is missing to fit anything, in words; None where it suffices."""
    num_rows = sum(1 for sample in dataset.samples if sample.measured)
    families = {sample.family for sample in dataset.samples if sample.measured}
    lacks = []
    if num_rows < options.min_rows:
        lacks.append(f"{options.min_rows - num_rows} more rows")
    if len(families) < options.min_families:
        lacks.append(f"rows of {options.min_families - len(families)} more model families")
    if not lacks:
        return None
    return f"{' and '.join(lacks)} are missing ({num_rows} rows of {len(families)} families so far)"


def train(
    dataset: Dataset, options: Options, origin: Origin, *, pace: Mapping[str, float] | None = None
) -> Training:
    """The candidate; deterministic.

    Args:
        dataset: the joined rows.
        options: how corrections are fitted and judged.
        origin: what the rows are.
        pace: how fast their steps were, to go with the correction.

    Raises:
        UserError: there are too few rows; says how many are missing.
    """
    lack = missing_rows(dataset, options)
    if lack is not None:
        raise UserError(key="rows", value=len(dataset.samples), allowed=lack)
    formula = dataset.table.formula["allocated"]
    estimated, known = formula, formula
    levels: dict[str, LevelResult] = {}
    for level in LEVELS:
        rows = LevelRows(
            level=level,
            table=dataset.table,
            measured=dataset.measured(level),
            stated=dataset.stated(level),
            allocated=known,
            estimated=estimated,
        )
        levels[level] = _level(rows, dataset, options)
        if level == "allocated":
            estimated = formula * np.exp(np.nan_to_num(levels[level].log_ratios))
            stated = dataset.stated("allocated")
            known = np.where(np.isnan(stated), estimated, stated)
    levels["reserved"] = _from_device(levels["reserved"], levels["device"])
    champion = Champion(
        levels={level: LevelModel.of(one.corrector, one.bound) for level, one in levels.items()},
        hull=Hull.of(dataset.table.features[~dataset.is_oom]),
        origin=origin,
        metrics={level: _metrics(one) for level, one in levels.items()},
        pace=pace or {},
    )
    return Training(champion=champion, levels=levels, oom=_verdicts(dataset, levels))


def _from_device(reserved: LevelResult, device: LevelResult) -> LevelResult:
    """What the allocator holds as the device level tells it, where no rows state it."""
    allocator = device.corrector.base if isinstance(device.corrector, Trees) else device.corrector
    if reserved.is_judged or not isinstance(allocator, Allocator):
        return reserved
    return replace(
        reserved,
        kind=Kind.ALLOCATOR,
        corrector=replace(allocator, level="reserved"),
        reason=f"as at the device level, less what lies outside the allocator; {reserved.reason}",
    )


def _metrics(result: LevelResult) -> dict[str, Any]:
    known = ~np.isnan(result.errors)
    return {
        "kind": result.kind.value,
        "reason": result.reason,
        "scores": {group: to_table(scores) for group, scores in result.scores.items()},
        "bound": {"tried": result.bound.tried, "held": result.bound.held},
        "errors": [round(float(error), 6) for error in np.sort(result.errors[known])],
    }


def _level(rows: LevelRows, dataset: Dataset, options: Options) -> LevelResult:
    families = np.array(dataset.labels("family"), dtype=object)
    num_rows = int(rows.is_known.sum())
    num_families = len(set(families[rows.is_known].tolist()))
    if num_rows < options.min_rows or num_families < options.min_families:
        return _formula_only(rows, families, options, num_rows, num_families)
    kinds = [Kind.FORMULA] + [
        kind for kind in Kind if kind in options.kinds and kind.knows(rows.level)
    ]
    ratios: dict[str, dict[Kind, Array]] = {}
    scores: dict[str, dict[Kind, Score]] = {}
    for group in GROUPS:
        labels = dataset.labels(group)
        if len({label for label, known in zip(labels, rows.is_known, strict=True) if known}) < 2:
            continue
        of_kinds = {
            kind: left_out_log_ratios(kind, rows, labels, options) for kind in dict.fromkeys(kinds)
        }
        ratios[group] = of_kinds
        scores[group] = {kind: _score(rows.error(one), labels) for kind, one in of_kinds.items()}
    kind, reason = choose(scores["family"])
    errors = rows.error(ratios["family"][kind])
    return LevelResult(
        level=rows.level,
        kind=kind,
        corrector=fit(kind, rows, np.ones(len(families), dtype=np.bool_), options),
        is_judged=True,
        scores=scores,
        bound=bound(errors, families.tolist(), options.coverage),
        log_ratios=ratios["family"][kind],
        errors=errors,
        reason=reason,
    )


def _formula_only(
    rows: LevelRows, families: Array, options: Options, num_rows: int, num_families: int
) -> LevelResult:
    none = np.zeros(len(families))
    errors = rows.error(none)
    scores = {"family": {Kind.FORMULA: _score(errors, families.tolist())}} if num_rows else {}
    return LevelResult(
        level=rows.level,
        kind=Kind.FORMULA,
        corrector=Constant(),
        is_judged=False,
        scores=scores,
        bound=Bound(log_margin=inf, rows=num_rows, tried=0, held=0),
        log_ratios=none,
        errors=errors,
        reason=f"{num_rows} rows of {num_families} families: {options.min_rows} rows of "
        f"{options.min_families} families are needed",
    )


def _score(errors: Array, labels: Sequence[str]) -> Score:
    known = ~np.isnan(errors)
    return score(errors[known], [label for label, one in zip(labels, known, strict=True) if one])


def choose(scores: Mapping[Kind, Score]) -> tuple[Kind, str]:
    """The simplest correction that none beats by `GAIN` of its mean error, and why.

    Args:
        scores: of corrections in `Kind`'s order, `formula` first, on families left out.
    """
    best = Kind.FORMULA
    for kind, one in scores.items():
        if one.mean < scores[best].mean * (1 - GAIN):
            best = kind
    means = ", ".join(f"{kind.value} {one.mean:.2%}" for kind, one in scores.items())
    return best, f"mean error on families left out: {means}"


def _verdicts(dataset: Dataset, levels: Mapping[str, LevelResult]) -> dict[str, OomScore]:
    """Verdicts of all rows by the upper bound at device level, with their families left out."""
    table, device = dataset.table, levels["device"]
    uppers = {"formula": table.upper["device"]}
    if device.bound.is_finite:
        ratios = device.log_ratios + max(0.0, device.bound.log_margin)
        scale = np.exp(np.nan_to_num(levels["allocated"].log_ratios))
        if levels["allocated"].bound.is_finite:
            margin = np.exp(max(0.0, levels["allocated"].bound.log_margin))
            scale = scale * margin * table.formula["allocated"] / table.upper["allocated"]
        libraries = LevelModel.of(device.corrector, device.bound).libraries_bytes
        ceiling = ceiling_bytes(uppers["formula"], table.capacity, scale, libraries)
        uppers["champion"] = np.minimum(table.formula["device"] * np.exp(ratios), ceiling)
    return {
        name: oom_score(upper, table.capacity, dataset.is_oom) for name, upper in uppers.items()
    }
