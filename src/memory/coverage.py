"""What the formula does not cover: asked for, it says so, and `auto` goes to the dry run."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture.losses import check_loss
from src.errors import NotCoveredError
from src.spec import FinetuneKind, Job, Method

_GAPS: tuple[tuple[str, Callable[[Job], object], Callable[[Job, Method], bool]], ...] = (
    (
        "finetune",
        lambda job: job.finetune.kind,
        lambda job, _: job.finetune.kind is FinetuneKind.PREFIX,
    ),
    (
        "finetune.dora",
        lambda _: "true",
        lambda job, method: job.finetune.dora and method is Method.ZERO3,
    ),
    (
        "vocab_parallel",
        lambda _: "true",
        lambda job, method: job.vocab_parallel and method.has_tensor_parallel,
    ),
)
"""(key, its value, whether the formula lacks it)."""


def require_covered(job: Job, method: Method) -> None:
    """Raise NotCoveredError where a library or the formula lacks what the job needs."""
    check_loss(job.model.model_type, job.loss)
    for key, value, lacks in _GAPS:
        if lacks(job, method):
            raise NotCoveredError(
                key=key, value=value(job), allowed="the formula has no term for it"
            )
