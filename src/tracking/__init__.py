"""Rows and models in MLflow: the only place that knows it. It loads when it is first asked."""

from __future__ import annotations

from src.tracking.address import default_uri, resolve_uri
from src.tracking.background import Tracker, sync
from src.tracking.log import Log
from src.tracking.registry import Registry
from src.tracking.rows import LoggedRows, logged_rows

__all__ = [
    "Log",
    "LoggedRows",
    "Registry",
    "Tracker",
    "default_uri",
    "logged_rows",
    "resolve_uri",
    "sync",
]
