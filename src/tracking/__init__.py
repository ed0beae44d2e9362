"""Rows in MLflow: the only place that knows it. It loads when the first row is logged."""

from __future__ import annotations

from src.tracking.address import default_uri, resolve_uri
from src.tracking.background import Tracker, sync
from src.tracking.log import Log

__all__ = ["Log", "Tracker", "default_uri", "resolve_uri", "sync"]
