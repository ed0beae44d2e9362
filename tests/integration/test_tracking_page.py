"""A row's page in MLflow: there where it can be made, and never in a row's way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.record import Outcome, Row, open_rows
from src.report.page_row import draw_page
from src.spec import Method
from src.tracking import Log, sync
from tests.measured_rows import asked, row_of, step_of
from tests.mlflow_server import runs_of
from tests.rows import SIMULATED

pytestmark = [
    # MLflow's own affair: SQLAlchemy deprecates what it uses, and it leaves databases open.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a Log sets for its process does not outlive the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def measured(method: Method = Method.SINGLE, num_gpus: int = 1) -> Row:
    row = row_of(step_of(asked(), method, num_gpus))
    more = {level: size + 2**30 for level, size in row.peak_bytes.items()}
    return replace(row, peak_bytes=more)


def logged(tmp_path: Path, row: Row, page: Any = draw_page) -> tuple[Any, dict[str, str]]:
    """The row's run, and its artifacts' texts by name."""
    from mlflow import MlflowClient

    store, file = f"sqlite:///{tmp_path / 'runs.db'}", tmp_path / "rows.jsonl"
    with open_rows(file) as rows:
        rows.append(row)
    log = Log(store, compare=lambda _: {}, draw=lambda _: None, page=page)
    assert sync(log, file) == (1, 1)
    (run,) = runs_of(store, row.provenance.campaign)[1]
    client = MlflowClient(tracking_uri=store)
    paths = [each.path for each in client.list_artifacts(run.info.run_id)]
    texts = {
        path: Path(client.download_artifacts(run.info.run_id, path, str(tmp_path))).read_text()
        for path in paths
    }
    return run, texts


def test_the_page_is_an_artifact_of_the_rows_run(tmp_path: Path) -> None:
    run, texts = logged(tmp_path, measured())
    assert (run.info.status, run.data.tags["logged"]) == ("FINISHED", "whole")
    page = texts["report.html"]
    assert page == draw_page(measured())
    for words in ("opt-125m", "Why off", "+1.000", "fragmentation"):
        assert words in page
    assert "page" not in run.data.tags


def test_a_page_that_cannot_be_made_costs_nothing(tmp_path: Path) -> None:
    def broken(_row: Row) -> str:
        raise ZeroDivisionError("no page\ntoday")

    run, texts = logged(tmp_path, measured(), broken)
    assert (run.info.status, run.data.tags["logged"]) == ("FINISHED", "whole")
    assert set(texts) == {"row.json"}
    assert run.data.tags["page"] == "ZeroDivisionError: no page"


def test_a_page_that_cannot_be_sent_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the store is full")

    monkeypatch.setattr(mlflow.MlflowClient, "log_text", refuse)
    run, texts = logged(tmp_path, measured())
    assert run.data.tags["logged"] == "whole"
    assert set(texts) == {"row.json"}
    assert run.data.tags["page"] == "OSError: the store is full"


def test_what_the_formula_does_not_cover_has_no_page(tmp_path: Path) -> None:
    assert draw_page(SIMULATED) is None
    run, texts = logged(tmp_path, SIMULATED)
    assert "report.html" not in texts
    assert "page" not in run.data.tags


@pytest.mark.parametrize(
    ("method", "num_gpus"),
    [(Method.DDP, 4), (Method.FSDP, 2), (Method.ZERO3, 8), (Method.FSDP, 12), (Method.DDP, 16)],
)
def test_the_page_is_about_the_rows_method_alone(method: Method, num_gpus: int) -> None:
    page = draw_page(measured(method, num_gpus))
    assert page is not None
    assert f"{num_gpus} x a100-80gb" in page
    assert f"against {method} (dp{num_gpus}, micro batch 4)" in page
    assert "+1.000" in page


def test_a_row_without_bytes_has_the_estimate(tmp_path: Path) -> None:
    row = replace(measured(), outcome=Outcome.CRASHED, peak_bytes={}, instants={})
    page = draw_page(row)
    assert page is not None
    assert "Why off" not in page
    run, texts = logged(tmp_path, row)
    assert run.info.status == "FAILED"
    assert "report.html" in texts
