"""What training came to, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from src.residual.champion import Champion
from src.residual.dataset import Dataset
from src.residual.drift import LevelDrift
from src.residual.evaluate import OomScore, Score
from src.residual.gate import Decision
from src.residual.training import LevelResult, Training

HEADER = (
    "level",
    "left out",
    "correction",
    "rows",
    "groups",
    "median",
    "p95",
    "signed",
    "worst under",
)


def render_training(dataset: Dataset, training: Training, decision: Decision) -> str:
    """Errors on groups left out, bounds, verdicts, and what the gate says."""
    rows: list[tuple[str, ...]] = [HEADER]
    for result in training.levels.values():
        rows += list(_lines(result))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [f"{len(dataset.samples)} rows used, {len(dataset.refused)} refusals", ""]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append("")
    lines += [bound_words(result) for result in training.levels.values()]
    lines += [oom_words(name, one) for name, one in training.oom.items()]
    lines.append(pace_words(training.champion.pace))
    lines += ["", *decision.reasons]
    lines.append("champion moved" if decision.is_better else "champion not moved")
    return "\n".join(lines) + "\n"


def _lines(result: LevelResult) -> Iterator[tuple[str, ...]]:
    for group, scores in result.scores.items():
        for kind, score in scores.items():
            mark = "*" if kind is result.kind else ""
            yield (result.level, group, f"{kind.value}{mark}", *score_words(score))


def score_words(score: Score) -> tuple[str, ...]:
    """A score's numbers in the order of `HEADER`."""
    return (
        str(score.rows),
        str(score.groups),
        f"{score.median:.2%}",
        f"{score.p95:.2%}",
        f"{score.signed:+.2%}",
        f"{score.worst_under:+.1%}",
    )


def bound_words(result: LevelResult) -> str:
    """The upper bound of a level in a line."""
    bound = result.bound
    if not result.is_judged:
        return f"{result.level}: {result.kind.value}, not judged ({result.reason})"
    if not bound.is_finite:
        return f"{result.level}: {bound.rows} rows are too few for an upper bound"
    held = ""
    if bound.tried:
        held = f"; a bound from other families held for {bound.held} of {bound.tried} rows"
    return f"{result.level}: upper bound {bound.margin:+.2%} from {bound.rows} rows{held}"


def pace_words(pace: Mapping[str, float]) -> str:
    """How fast measured steps were, in a line."""
    if not pace:
        return "step times: too few rows were timed; tokens/s is the model's own"
    parts = ", ".join(f"{name} {pace[name]:.2f}" for name in ("compute", "memory", "communication"))
    return f"step times: {parts} of the model's seconds, from {pace['num_rows']:.0f} timed rows"


def oom_words(name: str, score: OomScore) -> str:
    """Verdicts of one estimator in a line."""
    return (
        f"verdicts by the {name}'s upper bound: {score.recalled} of {score.oom_rows} rows that ran "
        f"out of memory, and {score.warned - score.recalled} of {score.rows - score.oom_rows} that "
        "ran, are not said to fit"
    )


def render_drift(champion: Champion, drifts: Sequence[LevelDrift], outside: dict[str, int]) -> str:
    """Whether fresh rows follow the champion."""
    if not drifts:
        return f"{champion.version}: no fresh rows\n"
    lines = []
    for one in drifts:
        beyond = "" if one.beyond is None else f", {one.beyond} above their upper bound"
        verdict = f"drifted: {one.drifted}" if one.drifted else "follows the champion"
        lines.append(
            f"{one.level}: {one.rows} fresh rows, median error {one.median:+.2%}{beyond}: {verdict}"
        )
    if outside:
        names = ", ".join(f"{name} ({count})" for name, count in outside.items())
        lines.append(f"fresh rows outside what the champion has seen: {names}")
    return "\n".join([champion.version, *lines]) + "\n"
