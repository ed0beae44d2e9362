"""How much GPU memory a fine-tuning job needs: `python -m src.estimate model=opt-1.3b gpus=4`."""

from __future__ import annotations

import sys
from typing import Any

from src.config import (
    EXIT_NOTHING_FITS,
    EXIT_OK,
    Output,
    Question,
    answering,
    compose_keywords_with_files,
    compose_with_files,
    emit,
    emit_all,
    listing_rows,
    run_command,
    run_flag,
    to_output,
    to_request,
    warn,
)
from src.errors import UserError
from src.plan.result import Report
from src.plan.scale import Fitting, blocks, pareto, points
from src.report import progress_bar, render, render_listing, write_page, write_plot
from src.report.layouts import layouts_heading, render_points, stream_points


def estimate(**keys: Any) -> Report:
    """The answer to the keys of the command line, given as keyword arguments.

    Nested keys are dicts, or dotted names: `estimate(model="opt-1.3b", gpus=4,
    finetune={"kind": "lora", "r": 8})`, `estimate(..., **{"finetune.r": 8})`.

    Raises:
        UserError: a key or a value is not allowed.
    """
    for key in ("format", "plot", "snapshot", "report", "list", "layouts"):
        if key in keys:
            allowed = "for the command line only; src.report renders a report"
            raise UserError(key=key, value=keys[key], allowed=allowed)
    cfg, imported = compose_keywords_with_files(keys)
    with imported.naming_errors():
        question = to_request(cfg).told_first(imported.warnings)
        with answering(question) as answer:
            return answer.report


def run(arguments: list[str]) -> int:
    """Answer the command line on stdout; the exit code."""
    if run_flag(arguments):
        return EXIT_OK
    cfg, imported = compose_with_files(arguments)
    with imported.naming_errors():
        output = to_output(cfg)
        if output.listing is not None:
            emit(render_listing(listing_rows(output.listing), output.format))
            return EXIT_OK
        question = to_request(cfg).told_first(imported.warnings)
        if output.layouts is not None:
            return _layouts(question, output)
        return _answer(question, output)


def _layouts(question: Question, output: Output) -> int:
    """Layouts in place of an answer; the exit code."""
    request = question.request
    found = blocks(request)
    warn(question.warnings)
    if output.layouts == "all":
        seen = Fitting(points(found))
        emit_all(stream_points(seen, output.format))
        return EXIT_OK if seen.any else EXIT_NOTHING_FITS
    best = pareto(found)
    if output.format == "table":
        emit(render_points(best, heading=layouts_heading(request)))
    else:
        emit_all(stream_points(best, output.format))
    return EXIT_OK if best else EXIT_NOTHING_FITS


def _answer(question: Question, output: Output) -> int:
    with progress_bar() as watch, answering(question, watch=watch) as answer:
        report = answer.report
        if output.snapshot is not None:
            answer.write_snapshot(output.snapshot)
        if output.plot is not None:
            write_plot(report, output.plot, answer.timeline())
        if output.page is not None:
            write_page(report, output.page, answer.timeline())
    emit(render(report, output.format))
    if output.format == "csv":
        sys.stderr.writelines(f"warning: {warning}\n" for warning in report.warnings)
    return EXIT_OK if report.recommended is not None else EXIT_NOTHING_FITS


if __name__ == "__main__":
    sys.exit(run_command(lambda: run(sys.argv[1:])))
