"""Rows read back from MLflow."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.record import Row
from src.tracking.quiet import first_line, quiet

EXPERIMENTS = "name LIKE 'peakcast-%'"
_LOGGED = "tags.logged = 'whole'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A run whose row cannot be read.

    Attributes:
        row_id: as the run's tag has it.
        reason: why.
    """

    row_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRows:
    """What a store holds.

    Attributes:
        rows: every row that is in it whole, once.
        unread: those that cannot be read.
    """

    rows: tuple[Row, ...]
    unread: tuple[Unread, ...]


def logged_rows(uri: str) -> LoggedRows:
    """Every row of a tracking store.

    Args:
        uri: its address, as `resolve_uri` gives it.

    Raises:
        UserError: it is not to be reached.
    """
    quiet()
    try:
        return _read(uri)
    except Exception as error:  # whatever MLflow raises is about its store
        raise UserError(key="tracking.uri", value=uri, allowed=first_line(error)) from error


def _read(uri: str) -> LoggedRows:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    rows: dict[str, Row] = {}
    unread: list[Unread] = []
    with tempfile.TemporaryDirectory() as folder:
        for run in _runs(client):
            row_id = run.data.tags.get("row_id", run.info.run_id)
            if row_id in rows:
                continue
            try:
                path = client.download_artifacts(run.info.run_id, "row.json", folder)
                rows[row_id] = Row.from_json(json.loads(Path(path).read_text("utf-8")))
            except UserError as error:
                unread.append(Unread(row_id=row_id, reason=error.allowed))
            except Exception as error:  # a missing or cut artifact is told, not fatal
                unread.append(Unread(row_id=row_id, reason=first_line(error)))
    return LoggedRows(rows=tuple(rows.values()), unread=tuple(unread))


def _runs(client: Any) -> Iterator[Any]:
    experiments = [
        one.experiment_id for one in client.search_experiments(filter_string=EXPERIMENTS)
    ]
    token = None
    while experiments:
        page = client.search_runs(experiments, _LOGGED, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
