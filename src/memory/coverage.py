"""What the formula does not cover: asked for, it says so, and `auto` goes to the dry run."""

from __future__ import annotations

from collections.abc import Callable

from src.errors import NotCoveredError
from src.spec import Checkpointing, FinetuneKind, Job, Loss, Method

_KINDS = (FinetuneKind.FULL, FinetuneKind.LORA)

_GAPS: tuple[tuple[str, Callable[[Job], object], Callable[[Job, Method], bool]], ...] = (
    ("finetune", lambda job: job.finetune.kind, lambda job, _: job.finetune.kind not in _KINDS),
    ("finetune.dora", lambda _: True, lambda job, _: job.finetune.dora),
    (
        "checkpointing",
        lambda job: job.checkpointing,
        lambda job, _: job.checkpointing is Checkpointing.SELECTIVE,
    ),
    (
        "checkpoint_every",
        lambda job: job.checkpoint_every,
        lambda job, _: job.checkpoint_every > 1,
    ),
    ("loss", lambda job: job.loss, lambda job, _: job.loss is not Loss.STANDARD),
    ("activation_offload", lambda _: True, lambda job, _: job.activation_offload),
)
"""(key, its value, whether the formula lacks it)."""


def require_covered(job: Job, method: Method) -> None:
    """Raise NotCoveredError where the formula lacks a term that the job needs."""
    for key, value, lacks in _GAPS:
        if lacks(job, method):
            raise NotCoveredError(
                key=key, value=value(job), allowed="the formula has no term for it"
            )
