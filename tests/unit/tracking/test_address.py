"""Addresses of tracking stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from src.errors import UserError
from src.tracking import default_uri, resolve_uri


def test_the_default_is_the_environments_or_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert default_uri(tmp_path) == "http://localhost:5000"


def test_a_databases_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_uri("sqlite:///runs.db") == f"sqlite:///{tmp_path}/runs.db"
    for uri in ("http://localhost:5000", "https://host/path", "postgresql+psycopg2://u@h/d"):
        assert resolve_uri(uri) == uri


@pytest.mark.parametrize(
    "uri", ["", "runs", "./mlruns", "file:///tmp/mlruns", "http:", "sqlite:////nowhere/at/all.db"]
)
def test_other_addresses_are_refused(uri: str) -> None:
    with pytest.raises(UserError, match=r"tracking\.uri="):
        resolve_uri(uri)
