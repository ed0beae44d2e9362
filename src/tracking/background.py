"""Logging beside a campaign: it never waits for MLflow, and never loses a row to it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from src.errors import UserError
from src.record import Row, read_rows
from src.tracking.log import Log
from src.tracking.quiet import first_line

CLOSE_S = 60.0
"""How long the end of a campaign waits for rows that are still being logged."""

HURRIED_CLOSE_S = 3.0
"""The same where it was interrupted or failed."""


class Tracker:
    """Logs rows in a thread of its own, in order; one that fails is tried again after the next.

    A context, at whose end rows that are not logged yet are waited for a while.

    Attributes:
        problem: why rows are not logged; None where all are. Rows are in their file all the same.

    Args:
        log: where to.
        file: the file of the rows.
        rows: those that it holds already; they are logged where they are not yet.
    """

    def __init__(self, log: Log, file: Path, rows: Iterable[Row] = ()) -> None:
        self.problem: str | None = None
        self._log = log
        self._file = file
        self._rows: list[Row] = []
        self._pending: list[Row] = []
        self._queue: SimpleQueue[Row | None] = SimpleQueue()
        for row in rows:
            self.add(row)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Log a row as soon as may be."""
        self._queue.put(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        wait_s = CLOSE_S if error is None else HURRIED_CLOSE_S
        self._thread.join(wait_s)
        if self._thread.is_alive() and self.problem is None:
            self.problem = f"not done after {wait_s:g} s"

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._collect()
            self._try(is_last=is_last)

    def _collect(self) -> bool:
        """Take all rows that wait, at least one; whether they are the last."""
        item = self._queue.get()
        while item is not None:
            self._rows.append(item)
            self._pending.append(item)
            try:
                item = self._queue.get_nowait()
            except Empty:
                return False
        return True

    def _try(self, *, is_last: bool) -> None:
        try:
            while self._pending:
                self._log.add(self._pending[0])
                del self._pending[0]
            if is_last and self._rows:
                self._log.close_campaigns(self._rows, self._file)
        except Exception as error:  # whatever MLflow raises must not cost the campaign
            self.problem = first_line(error)
        else:
            self.problem = None


def sync(log: Log, file: Path) -> tuple[int, int]:
    """Log every row of a file that is not logged yet; how many those were, and how many rows.

    Raises:
        UserError: the file has no rows, or the store is not to be reached.
    """
    found = read_rows(file)
    if not found.rows:
        raise UserError(key="out", value=file, allowed="a file of rows")
    try:
        num_new = sum(log.add(row) for row in found.rows)
        log.close_campaigns(found.rows, file)
    except Exception as error:  # whatever MLflow raises is about its store
        raise UserError(key="tracking.uri", value=log.uri, allowed=first_line(error)) from error
    return num_new, len(found.rows)
