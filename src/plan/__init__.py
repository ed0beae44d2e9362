"""Methods compared, the largest micro batch, the recommendation; takes any estimator."""

from __future__ import annotations

from src.plan.compare import compare
from src.plan.search import Estimator, largest_micro_batch, verdict

__all__ = ["Estimator", "compare", "largest_micro_batch", "verdict"]
