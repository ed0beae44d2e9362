"""The report as one HTML file that needs nothing else: no network, no script of others."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from src.errors import UserError
from src.plan.result import MethodReport, Report
from src.report.gap import cause_lines, gap_title
from src.report.gap import sections as gap_sections
from src.report.page.pictures import ledger_picture, pareto_picture, timeline_picture
from src.report.page.style import STYLE
from src.report.words import column, gib, layout_text, shown_method, terms_by_size
from src.spec import Verdict

if TYPE_CHECKING:
    from src.measure.timeline import Timeline

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def write_page(report: Report, path: Path, timeline: Timeline | None = None) -> None:
    """Write the report's page; the file appears at once or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(render_page(report, timeline), "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        allowed = f"cannot be written ({error.strerror or error})"
        raise UserError(key="report", value=path, allowed=allowed) from error
    finally:
        temporary.unlink(missing_ok=True)


def render_page(report: Report, timeline: Timeline | None = None) -> str:
    """The page as text; a timeline (of the report's first row) adds its picture."""
    shown = shown_method(report)
    sections = [_head(report), _methods(report), _advice(report)]
    if len(report.methods) > 1:
        sections.append(_section("Memory and speed", pareto_picture(report)))
    if shown is not None:
        sections.append(_ledger(report, shown))
    if timeline is not None:
        sections.append(_section("Live bytes over the step", timeline_picture(timeline)))
    sections += [_gap(report), _notes(report), _provenance(report)]
    title = f"{report.model.name} on {report.request.cluster.num_gpus} x {report.gpu.sku}"
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=_text(title), style=STYLE, body=body)


def _text(value: object) -> str:
    """Escaped: whatever came from a config is text and nothing else."""
    return html.escape(str(value), quote=True)


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{_text(heading)}</h2>\n{content}\n</section>"


def _table(headings: Iterable[str], rows: Iterable[tuple[str, list[object]]], *, label: str) -> str:
    """A table in a frame that scrolls by itself; rows are (class, cells)."""
    head = "".join(f"<th scope='col'>{_text(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr class='{kind}'>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
        for kind, cells in rows
    )
    return (
        f"<div class='frame' tabindex='0' role='region' aria-label='{_text(label)}'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(report: Report) -> str:
    model, cluster = report.model, report.request.cluster
    chosen = report.recommended
    trained = f"{model.num_trainable_parameters:,} trained"
    if model.num_trainable_parameters == model.num_parameters:
        trained = "all trained"
    if chosen is None:
        verdict, words = "oom", "Nothing fits"
    else:
        verdict = "fits"
        words = f"{chosen.method} ({layout_text(chosen.layout)}), micro batch {chosen.micro_batch}"
    reason = "" if chosen is None else f"<p>{_text(chosen.reason)}</p>"
    return (
        f"<header><h1>{_text(model.name)}</h1>"
        f"<p>{model.num_parameters:,} parameters, {trained}; "
        f"{cluster.num_gpus} x {_text(report.gpu.sku)}, {report.gpu.usable_gib:.2f} GiB usable on "
        f"each</p><p class='verdict {verdict}'>{_text(words)}</p>{reason}</header>"
    )


def _methods(report: Report) -> str:
    headings = ["method", "layout", "verdict", "upper bound", "device", "micro batch"]
    headings += ["largest batch", "tokens/s", "peak set by", "allocated", "reserved"]
    rows: list[tuple[str, list[object]]] = []
    for row in report.methods:
        rate = row.tokens_per_second
        peak, upper = row.peak_bytes, row.upper_bytes
        cells: list[object] = [row.method.value, layout_text(row.layout), row.verdict.value]
        cells += [gib(upper.device), gib(peak.device), row.micro_batch]
        cells += [row.max_micro_batch or "none", "-" if rate is None else f"{rate:,.0f}"]
        cells += [row.peak_instant, gib(peak.allocated), gib(peak.reserved)]
        rows.append((row.verdict.value, cells))
    caption = "<p>GiB per GPU. Upper bound: of the device's bytes.</p>"
    return _section("Methods", _table(headings, rows, label="methods") + caption)


def _advice(report: Report) -> str:
    if not report.advice:
        return ""
    headings = [
        "change",
        "method",
        "layout",
        "micro batch",
        "upper bound",
        "saved",
        "time per token",
    ]
    rows: list[tuple[str, list[object]]] = [
        (
            "",
            [
                advice.changes,
                advice.method.value,
                layout_text(advice.layout),
                advice.micro_batch,
                gib(advice.upper_bytes),
                gib(advice.saved_bytes),
                f"x {advice.time_ratio:.2f}",
            ],
        )
        for advice in report.advice
    ]
    fits = any(row.verdict is Verdict.FITS for row in report.methods)
    heading = "What would be faster and still fit" if fits else "What to change"
    return _section(heading, _table(headings, rows, label="advice"))


def _ledger(report: Report, shown: MethodReport) -> str:
    heading = f"Ledger of {shown.method} ({layout_text(shown.layout)}), level allocated"
    instants = list(shown.ledger)
    rows: list[tuple[str, list[object]]] = []
    for term in terms_by_size(shown):
        cells = [column(shown.ledger, instant).get(term, 0) for instant in instants]
        rows.append(("", [term, *(gib(cell) if cell else "-" for cell in cells)]))
    totals = [gib(sum(column(shown.ledger, instant).values())) for instant in instants]
    rows.append(("total", ["total", *totals]))
    table = _table(["term, GiB", *instants], rows, label="ledger")
    picture = ledger_picture(shown, usable_bytes=report.gpu.usable_bytes)
    return _section(heading, f"{picture}<details><summary>as a table</summary>{table}</details>")


def _gap(report: Report) -> str:
    gap = report.measured
    if gap is None:
        return ""
    tables = "".join(
        f"<h3>{_text(heading)}</h3>"
        + _table(headings, [("", list(cells)) for cells in rows], label=heading)
        for heading, (headings, rows) in gap_sections(gap)
    )
    lines = "".join(f"<li>{_text(line)}</li>" for line in cause_lines(gap))
    content = f"<p>{_text(gap_title(gap))}</p>{tables}<ul>{lines}</ul>"
    return _section("Why off", content)


def _notes(report: Report) -> str:
    notes = list(dict.fromkeys(note for row in report.methods for note in row.notes))
    lines = "".join(f"<li>{_text(line)}</li>" for line in [*notes, *report.warnings])
    return _section("What to know", f"<ul>{lines}</ul>") if lines else ""


def _provenance(report: Report) -> str:
    from src.report.as_json import request_dict

    calibration = report.calibration
    source = f"estimator: {report.estimator}"
    if calibration is not None:
        source += f"; {calibration.model}, learned from {calibration.rows} rows"
    request = request_dict(report.request)
    items = "".join(
        f"<dt>{_text(key)}</dt><dd>{_text(json.dumps(value))}</dd>"
        for key, value in request.items()
        if key != "arch"
    )
    return _section("Where this comes from", f"<p>{_text(source)}</p><dl>{items}</dl>")
