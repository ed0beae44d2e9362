"""What is being done, on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar() -> Iterator[Callable[[str | None], None]]:
    """A function that is told what starts, and None when it has ended; the bar is gone afterwards.

    Nothing is printed, and rich is not imported, unless stderr is a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("dry run {task.fields[number]}: {task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, number=0, visible=False)
        number = 0

        def watch(words: str | None) -> None:
            nonlocal number
            if words is not None:
                number += 1
                progress.update(task, description=words, number=number, visible=True)

        yield watch
