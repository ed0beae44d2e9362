"""Where MLflow keeps its runs."""

from __future__ import annotations

import os
from pathlib import Path

from src.errors import UserError

_SQLITE = "sqlite:///"
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
_ALLOWED = "sqlite:///FILE, http://HOST:PORT, or another database or server that MLflow knows"


def default_uri(folder: Path) -> str:
    """MLFLOW_TRACKING_URI, or a SQLite database in `folder`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}{folder.absolute() / 'mlflow.db'}"


def resolve_uri(uri: str) -> str:
    """The address, with the path of a SQLite database made absolute.

    Raises:
        UserError: it is no address of a tracking store.
    """
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme not in _SCHEMES or "://" not in uri:
        raise UserError(key="tracking.uri", value=uri, allowed=_ALLOWED)
    path = sqlite_path(uri)
    if path is None:
        return uri
    if not path.parent.is_dir() or path.is_dir():
        allowed = "a file in a folder that exists"
        raise UserError(key="tracking.uri", value=uri, allowed=allowed)
    return f"{_SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of a SQLite database; None for any other store."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE)).expanduser().absolute()
