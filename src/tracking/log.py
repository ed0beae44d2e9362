"""Rows as MLflow runs: an experiment a campaign, a parent run, a child run a row, each once."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from src.record import Outcome, Row
from src.tracking.address import sqlite_path
from src.tracking.flat import metrics, params, sku, table_line, tags, title
from src.tracking.quiet import first_line, quiet
from src.units import Levels

Compare = Callable[[Row], Mapping[str, Levels]]
"""Estimator -> what it says of a row's case."""
Draw = Callable[[Row], Any]
"""A row's picture as a matplotlib figure; None where there is none."""
Page = Callable[[Row], str | None]
"""A row's page as HTML; None where there is none."""

EXPERIMENT = "peakcast-{campaign}"

KIND = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's pages show runs, not conversations."""

_BATCH = 100
"""Parameters that MLflow takes at once."""
_FAILED = (Outcome.CRASHED, Outcome.TIMEOUT)
_FINISHED = "FINISHED"
PAGE = "report.html"
_WHOLE = "whole"
"""A run with this tag has everything of its row."""


class Log:
    """The rows of a tracking store.

    Args:
        uri: its address, as `resolve_uri` gives it.
        compare: what estimators say of a row.
        draw: a row's picture.
        page: a row's page; one that fails is told in the run's tag `page`, and costs nothing else.
    """

    def __init__(self, uri: str, *, compare: Compare, draw: Draw, page: Page) -> None:
        quiet()
        self.uri = uri
        self._compare = compare
        self._draw = draw
        self._page = page
        self._database = sqlite_path(uri)
        self._experiments: dict[str, str] = {}
        self._parents: dict[tuple[str, ...], str] = {}
        self._known: dict[str, set[str]] = {}
        self._client: Any = None

    def add(self, row: Row) -> bool:
        """Log a row; whether it was not there yet.

        A run that was begun and not finished, by a process that was killed, is taken up again.

        Raises:
            MlflowException, OSError: the store is not to be reached, or refuses.
        """
        with self._turn():
            experiment = self._experiment(row)
            if row.row_id in self._logged(experiment):
                return False
            run_id = self._begun(experiment, row) or self._begin(
                experiment, row, title(row), tags(row), self._parent(row)
            )
        compared = self._compare(row)
        with self._turn():
            self._fill(run_id, row, compared)
        self._logged(experiment).add(row.row_id)
        return True

    def close_campaigns(self, rows: Sequence[Row], file: Path) -> None:
        """Give each campaign's parent run its rows so far, as a dataset and as a file.

        Raises:
            MlflowException, OSError: as for `add`.
        """
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(_parent_key(row), []).append(row)
        for mine in groups.values():
            with self._turn():
                self._experiment(mine[0])
                self._close(self._parent(mine[0]), mine, file)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One process at a time creates or writes a SQLite database."""
        if self._database is None:
            self._connect()
            yield
            return
        with self._database.with_name(f"{self._database.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._connect()
            yield

    def _connect(self) -> None:
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)

    def _experiment(self, row: Row) -> str:
        name = EXPERIMENT.format(campaign=row.provenance.campaign)
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            if found is None:
                self._experiments[name] = self._client.create_experiment(
                    name, artifact_location=self._artifacts(name), tags=KIND
                )
            else:
                self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _artifacts(self, name: str) -> str | None:
        """Beside a SQLite database; a server knows its own place."""
        if self._database is None:
            return None
        return (self._database.parent / "mlruns" / name).as_uri()

    def _logged(self, experiment: str) -> set[str]:
        """Ids of the rows that are in the experiment whole, as far as this process knows."""
        if experiment not in self._known:
            runs = self._search(experiment, f"tags.logged = '{_WHOLE}'")
            self._known[experiment] = {run.data.tags["row_id"] for run in runs}
        return self._known[experiment]

    def _begun(self, experiment: str, row: Row) -> str | None:
        """The run of a row that another process has begun, or is at."""
        found = next(self._search(experiment, f"tags.row_id = '{row.row_id}'"), None)
        return None if found is None else str(found.info.run_id)

    def _search(self, experiment: str, which: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs([experiment], which, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _parent(self, row: Row) -> str:
        key = _parent_key(row)
        if key not in self._parents:
            campaign, gpu, source = key
            experiment = self._experiment(row)
            mine = {"role": "campaign", "campaign": campaign, "gpu": gpu, "source": source}
            which = " AND ".join(f"tags.{name} = '{value}'" for name, value in mine.items())
            found = next(self._search(experiment, which), None)
            if found is None:
                self._parents[key] = self._begin(experiment, row, " ".join(key), mine, None)
            else:
                self._parents[key] = found.info.run_id
        return self._parents[key]

    def _begin(
        self, experiment: str, row: Row, name: str, mine: Mapping[str, str], parent: str | None
    ) -> str:
        started = _milliseconds(row.provenance.started)
        of_parent = {} if parent is None else {"mlflow.parentRunId": parent}
        run = self._client.create_run(
            experiment, start_time=started, run_name=name, tags={**mine, **of_parent}
        )
        run_id: str = run.info.run_id
        return run_id

    def _fill(self, run_id: str, row: Row, compared: Mapping[str, Levels]) -> None:
        from mlflow.entities import Metric, Param

        client, started = self._client, _milliseconds(row.provenance.started)
        ended = started + round(row.provenance.duration_s * 1000)
        spec = [Param(key, value) for key, value in params(row).items()]
        for first in range(0, len(spec), _BATCH):
            client.log_batch(run_id, params=spec[first : first + _BATCH])
        numbers = metrics(row, compared).items()
        client.log_batch(run_id, metrics=[Metric(key, value, ended, 0) for key, value in numbers])
        client.log_dict(run_id, row.to_json(), "row.json")
        if row.ledger:
            client.log_dict(run_id, row.to_json()["ledger"], "ledger.json")
        picture = self._draw(row)
        if picture is not None:
            client.log_figure(run_id, picture, "timeline.png")
        self._add_page(run_id, row)
        status = "FAILED" if row.outcome in _FAILED else _FINISHED
        client.set_tag(run_id, "logged", _WHOLE)
        client.set_terminated(run_id, status=status, end_time=ended)

    def _add_page(self, run_id: str, row: Row) -> None:
        """The page is an extra: neither its making nor its upload may keep a row out."""
        try:
            page = self._page(row)
            if page is not None:
                self._client.log_text(run_id, page, PAGE)
        except Exception as error:  # of any kind: the row is what counts
            self._client.set_tag(run_id, "page", first_line(error))

    def _close(self, run_id: str, rows: Sequence[Row], file: Path) -> None:
        import pandas
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.pandas_dataset import from_pandas
        from mlflow.entities import Dataset, DatasetInput

        frame = pandas.DataFrame([table_line(row) for row in rows])
        name = "-".join(_parent_key(rows[0]))
        made = from_pandas(frame, source=CodeDatasetSource({"file": str(file)}), name=name)
        known = self._client.get_run(run_id).inputs.dataset_inputs
        if made.digest not in [each.dataset.digest for each in known]:
            fields = made.to_dict()
            names = ("name", "digest", "source_type", "source", "schema", "profile")
            entity = Dataset(**{key: fields[key] for key in names})
            self._client.log_inputs(run_id, datasets=[DatasetInput(dataset=entity, tags=[])])
        counts: dict[str, int] = {"rows": len(rows)}
        for row in rows:
            counts[row.outcome.value] = counts.get(row.outcome.value, 0) + 1
        for key, value in counts.items():
            self._client.log_metric(run_id, key, value)
        self._client.log_artifact(run_id, str(file))
        last = max(_milliseconds(row.provenance.started) for row in rows)
        self._client.set_terminated(run_id, status=_FINISHED, end_time=last)


def _parent_key(row: Row) -> tuple[str, str, str]:
    return row.provenance.campaign, sku(row), row.source.value


def _milliseconds(moment: str) -> int:
    return round(datetime.fromisoformat(moment).timestamp() * 1000)
