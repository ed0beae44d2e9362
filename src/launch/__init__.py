"""How a campaign's cases are run: one after another here, or each as a job of a cluster."""

from __future__ import annotations

from src.launch.running import run_campaign
from src.launch.submission import Jobs

__all__ = ["Jobs", "run_campaign"]
