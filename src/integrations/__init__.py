"""Rows from training that runs anyway: one line in the user's own script."""

from __future__ import annotations

from src.integrations.trainer import PeakcastCallback

__all__ = ["PeakcastCallback"]
