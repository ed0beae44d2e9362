"""What the dry run cannot run: asked for, it says so in one line."""

from __future__ import annotations

from collections.abc import Callable

from src.errors import NotCoveredError
from src.measure.options import LoopOptions
from src.spec import Job, Method, Offload, refusal

_GAPS: tuple[tuple[str, Callable[[Job], object], Callable[[Job, Method], bool]], ...] = (
    ("offload", lambda job: job.offload, lambda job, _: job.offload is not Offload.NONE),
)
"""(key, its value, whether the dry run lacks it)."""


def require_covered(job: Job, method: Method, loop: LoopOptions) -> None:
    """Raise UserError where the job cannot run by the method, or the dry run cannot run it."""
    impossible = refusal(job, method, autocasts=loop.autocast_half_weights)
    if impossible is not None:
        raise impossible
    if method.is_zero:
        allowed = "DeepSpeed's engine is not part of the dry run; the formula covers it"
        raise NotCoveredError(key="method", value=method, allowed=allowed)
    for key, value, lacks in _GAPS:
        if lacks(job, method):
            allowed = "not part of the dry run"
            raise NotCoveredError(key=key, value=value(job), allowed=allowed)
