"""How much GPU memory a fine-tuning job needs: `python -m src.estimate model=opt-1.3b gpus=4`."""

from __future__ import annotations

import sys
from typing import Any

from src.config import (
    EXIT_NOTHING_FITS,
    EXIT_OK,
    answering,
    compose_arguments,
    compose_keywords,
    emit,
    listing_rows,
    run_command,
    run_flag,
    to_output,
    to_request,
)
from src.errors import UserError
from src.plan.result import Report
from src.report import progress_bar, render, render_listing, write_page, write_plot


def estimate(**keys: Any) -> Report:
    """The answer to the keys of the command line, given as keyword arguments.

    Nested keys are dicts, or dotted names: `estimate(model="opt-1.3b", gpus=4,
    finetune={"kind": "lora", "r": 8})`, `estimate(..., **{"finetune.r": 8})`.

    Raises:
        UserError: a key or a value is not allowed.
    """
    for key in ("format", "plot", "snapshot", "report", "list"):
        if key in keys:
            allowed = "for the command line only; src.report renders a report"
            raise UserError(key=key, value=keys[key], allowed=allowed)
    with answering(to_request(compose_keywords(keys))) as answer:
        return answer.report


def run(arguments: list[str]) -> int:
    """Answer the command line on stdout; the exit code."""
    if run_flag(arguments):
        return EXIT_OK
    cfg = compose_arguments(arguments)
    output = to_output(cfg)
    if output.listing is not None:
        emit(render_listing(listing_rows(output.listing), output.format))
        return EXIT_OK
    question = to_request(cfg)
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
