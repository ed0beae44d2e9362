"""Adapters that cannot follow their Linear where the sequence is split.

Around Linears whose outputs are gathered, or whose inputs are cut (Phi-3's, OLMo 2's), PEFT leaves
adapters whole; behind such a Linear the sequence is a part and an adapter's output would not be.
"""

from __future__ import annotations

from src.architecture import Decoder
from src.architecture.ops import Linear, Parallel
from src.errors import UserError
from src.memory.lowering import is_target
from src.spec import Job, Layout


def check_adapters(decoder: Decoder, job: Job, layout: Layout) -> None:
    """Refuse sequence parallelism of adapters that stay whole.

    Raises:
        UserError: a Linear with an adapter gathers its outputs, or cuts its inputs.
    """
    if not (job.sequence_parallel and job.finetune.is_lora and layout.tp > 1):
        return
    whole = (Parallel.COLUMN_GATHERED, Parallel.ROW_SCATTERED)
    for op in decoder.blocks[0].ops:
        if isinstance(op, Linear) and op.parallel in whole and is_target(op, job.finetune):
            raise unsplit_adapters(job)


def unsplit_adapters(job: Job) -> UserError:
    """The error for such an adapter."""
    return UserError(
        key="sequence_parallel",
        value="true",
        allowed=f"false with LoRA: {job.model.model_type} gathers what its adapted Linears give",
    )
