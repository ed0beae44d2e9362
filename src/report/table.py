"""The answer for people: methods, recommendation, the ledger behind it, warnings."""

from __future__ import annotations

import io
from dataclasses import fields

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from src.plan.result import MethodReport, Report
from src.report.advice import advice_heading, advice_table
from src.report.gap import print_gap
from src.report.solved import solved_heading, solved_table
from src.report.words import column, gib, layout_text, shown_method, terms_by_size
from src.spec import FINETUNE_OPTIONS, Finetune, Job, Verdict

PLAIN_WIDTH = 100
"""Columns where nobody looks at a terminal."""
METHODS_HEADING = (
    "Peaks per GPU: allocated (tensors), device (as NVML sees it), upper bound of device"
)
_HEADING_RULE = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
_STYLES = {Verdict.FITS: "green", Verdict.TIGHT: "yellow", Verdict.OOM: "red"}


def render_table(report: Report, *, width: int = PLAIN_WIDTH, color: bool = False) -> str:
    """The answer as text of at most `width` columns (sentences are not cut)."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    _say(console, *_question_lines(report))
    if report.solved is not None:
        _say(console, *solved_heading(report))
        console.print(solved_table(report.solved, _new_table(width)))
        _say(console, "")
    _say(console, METHODS_HEADING)
    if report.methods:
        console.print(_methods_table(report, width))
    _say(console, *_note_lines(report))
    _say(console, *_expected_lines(report))
    _say(console, _recommendation_line(report), style="bold")
    if report.advice:
        _say(console, "", advice_heading(report))
        console.print(advice_table(report, _new_table(width)))
    shown = shown_method(report)
    if shown is not None:
        _say(console, "", *_ledger_heading(shown, report))
        console.print(_ledger_table(shown, width))
    if report.measured is not None:
        print_gap(report.measured, console, _say, lambda: _new_table(width))
    warnings = [f"warning: {warning}" for warning in report.warnings]
    _say(console, *(["", *warnings] if warnings else []))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _say(console: Console, *lines: str, style: str | None = None) -> None:
    for line in lines:
        console.print(Text(line, style=style or ""), soft_wrap=True)


def _question_lines(report: Report) -> list[str]:
    model, job, cluster = report.model, report.request.job, report.request.cluster
    name = model.name
    if model.hf_id is not None and model.hf_id != model.name:
        name = f"{model.name} ({model.hf_id})"
    trained = f"{model.num_trainable_parameters:,} of them trained"
    if model.num_trainable_parameters == model.num_parameters:
        trained = "all trained"
    nodes = f" on {cluster.num_nodes} nodes" if cluster.num_nodes > 1 else ""
    return [
        f"{name}: {model.num_parameters:,} parameters, {trained}",
        f"{cluster.num_gpus} x {report.gpu.sku}{nodes}, {report.gpu.usable_gib:.2f} GiB usable on "
        f"each; estimator={report.estimator}",
        f"finetune={job.finetune.kind} precision={job.precision} optimizer={job.optimizer} "
        f"seq_len={job.seq_len} grad_accum={job.grad_accum}",
        f"checkpointing={job.checkpointing} attention={job.attention} loss={job.loss}"
        + "".join(f" {words}" for words in _unusual(job)),
        *_unusual_finetune(job.finetune),
        "",
    ]


def _unusual(job: Job) -> list[str]:
    """Settings that are not at their defaults, beyond those that are always told."""
    told = {"model", "finetune", "seq_len", "grad_accum", "precision", "optimizer"}
    told |= {"checkpointing", "attention", "loss", "zero"}
    return [
        f"{item.name}={str(getattr(job, item.name)).lower()}"
        for item in fields(Job)
        if item.name not in told and getattr(job, item.name) != item.default
    ]


def _unusual_finetune(finetune: Finetune) -> list[str]:
    """One line of the kind's options that are not at their defaults, as they are typed; or none."""
    defaults = {item.name: item.default for item in fields(Finetune)}
    words = []
    for name in FINETUNE_OPTIONS[finetune.kind]:
        value = getattr(finetune, name)
        if value == defaults[name]:
            continue
        shown = f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)
        words.append(f"finetune.{name}={shown.lower() if isinstance(value, bool) else shown}")
    return [" ".join(words)] if words else []


def _new_table(width: int) -> Table:
    gap = (0, 1, 0, 0) if width >= PLAIN_WIDTH else (0, 0, 0, 0)
    return Table(box=_HEADING_RULE, pad_edge=False, padding=gap, show_edge=False)


def _methods_table(report: Report, width: int) -> Table:
    table = _new_table(width)
    table.add_column("method", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for heading in ("micro\nbatch", "alloc.\nGiB", "device\nGiB", "upper\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("peak set by", no_wrap=True)
    for heading in ("max\nbatch", "tokens\n/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for method in report.methods:
        rate = method.tokens_per_second
        table.add_row(
            method.method.value,
            layout_text(method.layout),
            str(method.micro_batch),
            gib(method.peak_bytes.allocated),
            gib(method.peak_bytes.device),
            gib(method.upper_bytes.device),
            method.peak_instant if width >= PLAIN_WIDTH else _in_two(method.peak_instant),
            str(method.max_micro_batch) if method.max_micro_batch else "none",
            "-" if rate is None else f"{rate:,.0f}",
            Text(method.verdict.value, style=_STYLES[method.verdict]),
        )
    return table


def _in_two(instant: str) -> str:
    """The name on two lines, cut at its last underscore."""
    start, underscore, end = instant.rpartition("_")
    return f"{start}{underscore}\n{end}" if underscore else end


def _note_lines(report: Report) -> list[str]:
    """Each note once, after the methods it is about; an empty line around."""
    owners: dict[str, list[str]] = {}
    for method in report.methods:
        for note in method.notes:
            names = owners.setdefault(note, [])
            if method.method.value not in names:
                names.append(method.method.value)
    num_methods = len({method.method for method in report.methods})
    lines = [
        note if len(names) == num_methods else f"{', '.join(names)}: {note}"
        for note, names in owners.items()
    ]
    return ["", *lines, ""] if lines else [""]


def _recommendation_line(report: Report) -> str:
    chosen = report.recommended
    if chosen is None:
        return "Recommended: nothing fits"
    layout = layout_text(chosen.layout)
    where = "" if layout == "-" else f" ({layout})"
    return f"Recommended: {chosen.method}{where}, micro batch {chosen.micro_batch}: {chosen.reason}"


def _expected_lines(report: Report) -> list[str]:
    """How far a usual step stays below the worst one, where sequences differ in length."""
    lengths = report.request.lengths
    if lengths is None:
        return []
    means = [
        f"{method.method} {gib(method.expected_bytes.device)}"
        for method in report.methods
        if method.expected_bytes is not None
    ]
    head = (
        f"{lengths.num_sequences:,} sequences of {lengths.mean:,.0f} tokens on average, "
        f"{lengths.longest:,} at most: peaks above are of a micro batch with the longest"
    )
    return [head, *([f"mean device GiB of a step: {', '.join(means)}"] if means else []), ""]


def _ledger_heading(method: MethodReport, report: Report) -> list[str]:
    peak, upper = method.peak_bytes, method.upper_bytes
    return [
        f"Ledger of {method.method} ({layout_text(method.layout)}, micro batch "
        f"{method.micro_batch}): allocated GiB per GPU, * marks the peak",
        f"allocated {gib(peak.allocated)} -> reserved {gib(peak.reserved)} -> device "
        f"{gib(peak.device)}, upper bound {gib(upper.device)} of {report.gpu.usable_gib:.2f} GiB",
        "",
    ]


def _ledger_table(method: MethodReport, width: int) -> Table:
    table = _new_table(width)
    table.add_column("term", overflow="fold")
    instants = list(method.ledger)
    for instant in instants:
        is_peak = instant == method.peak_instant
        heading = instant.replace("_", "\n") + ("\n*" if is_peak else "")
        table.add_column(
            Text(heading), justify="right", no_wrap=True, style="bold" if is_peak else ""
        )
    for term in terms_by_size(method):
        cells = [column(method.ledger, instant).get(term, 0) for instant in instants]
        table.add_row(term, *(gib(cell) if cell else "-" for cell in cells))
    table.add_section()
    totals = [sum(column(method.ledger, instant).values()) for instant in instants]
    table.add_row("total", *(gib(total) for total in totals))
    return table
