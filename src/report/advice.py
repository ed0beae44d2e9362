"""The table of advice: what to change, what it saves, what it costs."""

from __future__ import annotations

from rich.table import Table

from src.plan.result import Report
from src.report.words import gib, layout_text
from src.spec import Verdict


def advice_heading(report: Report) -> str:
    """What the changes are for."""
    if report.recommended is not None:
        return "What would be faster and still fit, one change at a time"
    if any(advice.verdict is Verdict.FITS for advice in report.advice):
        return "What would make it fit, least time first"
    return "Nothing tried makes it fit; what saves most"


def advice_table(report: Report, table: Table) -> Table:
    """Fill a table: one line a change, with the method that is best then."""
    table.add_column("change", overflow="fold")
    table.add_column("method", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for heading in ("micro\nbatch", "upper\nGiB", "saved\nGiB", "time per\ntoken"):
        table.add_column(heading, justify="right", no_wrap=True)
    for advice in report.advice:
        table.add_row(
            advice.changes,
            advice.method.value,
            layout_text(advice.layout),
            str(advice.micro_batch),
            gib(advice.upper_bytes),
            gib(advice.saved_bytes),
            f"x {advice.time_ratio:.2f}",
        )
    return table
