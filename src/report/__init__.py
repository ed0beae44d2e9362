"""How an answer is shown: tables, JSON, CSV, pictures. rich and matplotlib load when needed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from src.plan.result import Report
from src.report.listing import render_listing
from src.report.progress import progress_bar

if TYPE_CHECKING:
    from src.measure.timeline import Timeline

__all__ = ["progress_bar", "render", "render_listing", "write_page", "write_plot"]

_MIN_WIDTH, _MAX_WIDTH = 80, 120


def write_page(report: Report, path: Path, timeline: Timeline | None = None) -> None:
    """Write the report as one self-contained HTML file.

    Raises:
        UserError: the file cannot be written.
    """
    from src.report.page import write_page as write

    write(report, path, timeline)


def write_plot(report: Report, path: Path, timeline: Timeline | None = None) -> None:
    """Draw the report into `path`; its suffix (.png, .svg, .pdf) is the format.

    With a timeline (of the report's first row) the picture is that row's bytes over the step.

    Raises:
        UserError: the file cannot be written.
    """
    from src.report.plot import draw, write_figure

    if timeline is None:
        write_figure(lambda: draw(report), path)
        return
    from src.report.plot_timeline import draw_timeline

    write_figure(lambda: draw_timeline(report, timeline), path)


def render(report: Report, form: str) -> str:
    """The answer as `table`, `json` or `csv`; a table is coloured where stdout is a terminal."""
    if form == "json":
        from src.report.as_json import render_json

        return render_json(report)
    if form == "csv":
        from src.report.as_csv import render_csv

        return render_csv(report)
    from src.report.table import PLAIN_WIDTH, render_table

    if sys.stdout is None or not sys.stdout.isatty():
        return render_table(report, width=PLAIN_WIDTH)
    columns = shutil.get_terminal_size().columns
    return render_table(report, width=min(max(columns, _MIN_WIDTH), _MAX_WIDTH), color=True)
