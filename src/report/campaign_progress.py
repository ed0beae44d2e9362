"""How far a campaign is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from src.record import Row
from src.report.campaign import row_text


@contextmanager
def campaign_progress(total: int, *, done: int) -> Iterator[Callable[[Row], None]]:
    """A function that is told each row of a campaign; says on stderr when the last is expected.

    A bar where stderr is a terminal, else a line a row. An interrupt is said to lose nothing.

    Args:
        total: cases of the campaign.
        done: those that have a row already.
    """
    began, number = time.monotonic(), 0

    def expected_end() -> str:
        left = (time.monotonic() - began) / max(number, 1) * (total - done - number)
        return f"{datetime.now() + timedelta(seconds=left):%a %H:%M}"

    def tell(row: Row) -> None:
        nonlocal number
        number += 1
        place = f"[{done + number}/{total}, ends {expected_end()}]"
        print(f"{place} {row_text(row)}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        with _saying_interrupts():
            yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ends {task.fields[end]}: {task.description}"),
    )
    console = Console(stderr=True)
    with (
        _saying_interrupts(),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("first case", total=total, completed=done, end="?")

        def show(row: Row) -> None:
            nonlocal number
            number += 1
            text = row_text(row)
            progress.update(task, advance=1, description=text, end=expected_end(), refresh=True)

        yield show


@contextmanager
def _saying_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: every row so far is kept; the same command goes on", file=sys.stderr)
        raise
