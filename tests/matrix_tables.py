"""The pages that the matrix writes: docs/accuracy.md and docs/coverage.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.config.zoo import load
from src.errors import UserError
from src.measure.case import parse_case
from src.memory import columns
from src.spec import Method, refusal
from tests.jobs import gpu, layout_of
from tests.matrix_specs import AXES, DEFAULTS, Spec

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "accuracy.md"
COVERAGE = DOCS / "coverage.md"
BEGIN, END = "<!-- formula against dry run: begin -->", "<!-- formula against dry run: end -->"
TITLE = "# How accurate the numbers are"
SHOWN_ABOVE = 0.02
REFERENCE = "llama-3.2-1b"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both answers to one spec, at the level allocated."""

    spec: Spec
    formula_bytes: int
    dry_bytes: int
    formula_instant: str
    dry_instant: str
    instants: dict[str, tuple[int, int]]
    formula_reserved: int
    dry_reserved: int

    @property
    def reserved_error(self) -> float:
        """The same of what the caching allocator holds."""
        return self.formula_reserved / self.dry_reserved - 1

    @property
    def error(self) -> float:
        """(formula - dry run) / dry run."""
        return self.formula_bytes / self.dry_bytes - 1

    @property
    def same_instant(self) -> bool:
        """Whether both peak at the same instant; only the dry run has one between the blocks."""
        if self.dry_instant == "middle_block_backward":
            return self.formula_instant.endswith("block_backward")
        return self.formula_instant == self.dry_instant


def percentile(errors: Sequence[float], share: float) -> float:
    """The smallest error that `share` of the errors do not exceed."""
    return sorted(errors)[max(0, -(-round(len(errors) * share * 1000) // 1000) - 1)]


def _row(label: str, rows: Sequence[Comparison]) -> str:
    errors = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    same = sum(row.same_instant for row in rows)
    median = statistics.median(errors)
    return f"| {label} | {len(rows)} | {median:.2%} | {worst:+.2%} | {same} |"


def _table(
    name: str, rows: Sequence[Comparison], label: Callable[[Comparison], str], order: Iterable[str]
) -> list[str]:
    head = [f"| {name} | specs | median | worst | same instant |", "|---|---|---|---|---|"]
    groups = {key: [row for row in rows if label(row) == key] for key in order}
    return [*head, *(_row(key, mine) for key, mine in groups.items() if mine)]


def is_far(row: Comparison) -> bool:
    """Whether it is shown one by one."""
    return abs(row.error) > SHOWN_ABOVE


def _model_type(row: Comparison) -> str:
    return str(load("model", row.spec.model)["config"]["model_type"])


def _summary(rows: Sequence[Comparison]) -> str:
    errors = [abs(row.error) for row in rows]
    reserved = [abs(row.reserved_error) for row in rows]
    same = sum(row.same_instant for row in rows)
    return (
        f"Median {statistics.median(errors):.2%}, 95th percentile {percentile(errors, 0.95):.2%}, "
        f"worst {max((row.error for row in rows), key=abs):+.2%}; the same instant in {same} of "
        f"{len(rows)}. Level reserved, against the replay through the simulated allocator: "
        f"median {statistics.median(reserved):.2%}, 95th percentile "
        f"{percentile(reserved, 0.95):.2%}, worst "
        f"{max((row.reserved_error for row in rows), key=abs):+.2%}."
    )


def markdown(
    rows: Sequence[Comparison], *, command: str, blocks: int, failed: Sequence[str] = ()
) -> str:
    """The section of docs/accuracy.md."""
    lines = [
        "## Formula against the dry run",
        "",
        f"`{command}`: {len(rows)} specs over {len({row.spec.model for row in rows})} models of "
        f"{len({_model_type(row) for row in rows})} families, each model cut to {blocks} blocks of",
        "its full width; settings drawn with a fixed seed so that every two values meet that can. "
        "Error: (formula - dry run) / dry run,",
        "of the step's peak, level allocated. The dry run is a simulation, not a measurement.",
        "",
        _summary(rows),
        "",
        *_table("family", rows, _model_type, sorted({_model_type(row) for row in rows})),
    ]
    for axis, values in AXES.items():

        def label(row: Comparison, axis: str = axis) -> str:
            return row.spec.setting[axis]

        heading = "micro batch x sequence" if axis == "shape" else axis
        lines += ["", *_table(heading, rows, label, values)]
    far = sorted((row for row in rows if is_far(row)), key=lambda row: -abs(row.error))
    lines += ["", f"Specs that are off by more than {SHOWN_ABOVE:.0%}: {len(far) or 'none'}."]
    if far:
        lines += ["", "| spec | error | formula's instant | dry run's |", "|---|---|---|---|"]
        lines += [
            f"| {row.spec} | {row.error:+.2%} | {row.formula_instant} | {row.dry_instant} |"
            for row in far
        ]
    if failed:
        lines += ["", f"Not counted, as the dry run cannot simulate them: {len(failed)}.", ""]
        lines += [f"- {line}" for line in failed]
    return "\n".join(lines) + "\n"


def write_section(section: str, page: Path = PAGE) -> None:
    """Put the section into the page, in the place of an earlier one."""
    text = page.read_text("utf-8") if page.exists() else f"{TITLE}\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"{head}{BEGIN}\n{section}{END}{tail}", "utf-8")


def difference(row: Comparison) -> str:
    """Both answers by instant, for a spec that is off."""
    lines = [f"{row.error:+7.2%}  {row.spec}"]
    lines += [
        f"    {instant:<22}{formula:>16,}{dry:>16,}{formula - dry:>+16,}"
        for instant, (formula, dry) in row.instants.items()
    ]
    return "\n".join(lines)


def _cell(rows: Sequence[Comparison], method: Method, axis: str, label: str) -> str:
    """The mark of one value by one method, everything else at its default."""
    case = {**Spec(model=REFERENCE, setting=DEFAULTS | {axis: label}).raw(), "device": "simulated"}
    gpus = 1 if method is Method.SINGLE else 4
    layout = layout_of(method, gpus)
    job = parse_case(case).step.job
    mine = [
        row.error
        for row in rows
        if row.spec.setting["method"] == method.value and row.spec.setting[axis] == label
    ]
    if mine:
        return f"checked {max(mine, key=abs):+.2%} ({len(mine)})"
    if refusal(job, method) is not None:
        return "impossible"
    try:
        columns(job, method, layout, gpu())
    except UserError:
        return "unsupported"
    return "derived"


def coverage(rows: Sequence[Comparison]) -> str:
    """The page of cells: methods x the values of each setting."""
    lines = [
        "# What the formula covers",
        "",
        "Written by `python -m tests.matrix`. Each cell is one value of a setting by one method:",
        "",
        "- **checked**: in the matrix of docs/accuracy.md, with the worst error against the dry",
        "  run and the number of specs (their other settings vary).",
        "- **derived**: from the code of the library that runs it, not checked by the matrix.",
        "  ZeRO's cells are checked on small models against DeepSpeed's own engine:",
        "  docs/zero-accuracy.md.",
        "- **unsupported**: the formula has no term for it and says so.",
        "- **impossible**: the libraries refuse it, and so does peakcast, with the reason.",
    ]
    for axis, values in AXES.items():
        if axis in ("method", "gpu", "shape"):
            continue
        names = [method.value for method in Method]
        lines += ["", f"## {axis}", "", f"| {axis} | {' | '.join(names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for label in values:
            cells = [_cell(rows, method, axis, label) for method in Method]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_coverage(rows: Sequence[Comparison], page: Path = COVERAGE) -> None:
    """Write docs/coverage.md."""
    page.write_text(coverage(rows), "utf-8")
