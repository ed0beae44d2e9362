"""How an answer is shown: tables, JSON, CSV, pictures. rich and matplotlib load when needed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from src.plan.result import Report
from src.report.listing import render_listing

__all__ = ["render", "render_listing", "write_plot"]

_MIN_WIDTH, _MAX_WIDTH = 80, 120


def write_plot(report: Report, path: Path) -> None:
    """Draw the report into `path`; its suffix (.png, .svg, .pdf) is the format.

    Raises:
        UserError: the file cannot be written.
    """
    from src.report.plot import write_figure

    write_figure(report, path)


def render(report: Report, form: str) -> str:
    """The answer as `table`, `json` or `csv`; a table is coloured where stdout is a terminal."""
    if form == "json":
        from src.report.as_json import render_json

        return render_json(report)
    if form == "csv":
        from src.report.as_csv import render_csv

        return render_csv(report)
    from src.report.table import PLAIN_WIDTH, render_table

    if not sys.stdout.isatty():
        return render_table(report, width=PLAIN_WIDTH)
    columns = shutil.get_terminal_size().columns
    return render_table(report, width=min(max(columns, _MIN_WIDTH), _MAX_WIDTH), color=True)
