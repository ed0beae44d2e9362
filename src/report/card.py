"""The model card: what a champion was learned from, and how far off it is."""

from __future__ import annotations

from collections.abc import Mapping

from src.report.training import HEADER, bound_words, oom_words, pace_words, score_words
from src.residual.champion import NAME
from src.residual.dataset import Dataset
from src.residual.gate import Decision
from src.residual.training import Training


def render_card(dataset: Dataset, training: Training, decision: Decision) -> str:
    """The card as Markdown."""
    origin = training.champion.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    lines = [
        f"# {NAME}",
        "",
        "Made by `python -m src.train`. What the formula misses, learned from measured rows: a",
        "correction of each level, and an upper bound to it. Outside the range of the rows below",
        "it fades to the formula, the bound widens, and reports say `in_range: false`.",
        "",
        f"- made {origin.created} with {versions}",
        f"- {len(origin.row_ids)} rows, hash `{origin.rows_hash}`: {origin.source}; simulated rows",
        "  are never used",
        f"- families: {counts(origin.families)}",
        f"- methods: {counts(origin.methods)}",
        f"- GPUs: {counts(origin.gpus)}",
        *(
            f"- rows ran {library} {', '.join(found)}"
            for library, found in origin.row_versions.items()
        ),
        "",
        "## How far off it is on what it has not seen",
        "",
        "Whole groups of rows are left out, each once. `*`: kept. A correction has to take 2 % of",
        "the mean error away from every simpler one, or the simpler is kept.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
    ]
    for result in training.levels.values():
        for group, scores in result.scores.items():
            for kind, score in scores.items():
                name = f"**{kind.value}** *" if kind is result.kind else kind.value
                cells = (result.level, group, name, *score_words(score))
                lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Upper bounds and verdicts", ""]
    lines += [f"- {bound_words(result)}" for result in training.levels.values()]
    lines += [f"- {oom_words(name, one)}" for name, one in training.oom.items()]
    lines.append(f"- {pace_words(training.champion.pace)}")
    lines += ["", "## What answers at each level", ""]
    for level, model in training.champion.levels.items():
        corrector = model.corrector
        numbers = _numbers(corrector.parameters())
        lines.append(f"- {level}: {corrector.kind.value}{numbers}")
    lines += ["", "## Why it is the champion", ""]
    lines += [f"- {reason}" for reason in decision.reasons]
    if dataset.refused:
        lines += ["", "## Rows, or levels of rows, that were not used", ""]
        reasons: dict[str, int] = {}
        for refused in dataset.refused:
            reasons[refused.reason] = reasons.get(refused.reason, 0) + 1
        lines += [f"- {count} x {reason}" for reason, count in sorted(reasons.items())]
    if origin.urls:
        lines += ["", "## Where the published rows are from", ""]
        lines += [f"- {url}" for url in sites(origin.urls)]
    return "\n".join(lines) + "\n"


def counts(found: Mapping[str, int]) -> str:
    """`a100-80gb 37, h100-80gb 9`."""
    return ", ".join(f"{name} {count}" for name, count in found.items())


def sites(urls: tuple[str, ...]) -> list[str]:
    """Addresses without the line they point to, once each."""
    return list(dict.fromkeys(url.partition("#")[0] for url in urls))


def _numbers(parameters: Mapping[str, object]) -> str:
    shown = {
        name: value for name, value in parameters.items() if isinstance(value, float) and value
    }
    if not shown:
        return ""
    return " (" + ", ".join(f"{name} {value:.4g}" for name, value in shown.items()) + ")"
