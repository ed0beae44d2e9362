"""What cannot run where the sequence is split.

transformers sums over the group what experts give, whole. Around Linears whose outputs are
gathered, or whose inputs are cut (Phi-3's, OLMo 2's), PEFT leaves adapters whole; behind such a
Linear the sequence is a part and an adapter's output would not be.
"""

from __future__ import annotations

from src.architecture import Decoder
from src.architecture.ops import Linear, Parallel
from src.errors import NotCoveredError
from src.memory.tuning import is_target
from src.spec import Job, Layout


def check_sequence_parallel(decoder: Decoder, job: Job, layout: Layout) -> None:
    """Refuse sequence parallelism of experts, and of adapters that stay whole.

    Raises:
        NotCoveredError: there are experts, or a Linear with an adapter gathers its outputs or cuts
            its inputs.
    """
    if not job.sequence_parallel or layout.tp == 1:
        return
    if decoder.has_experts:
        raise whole_experts(job)
    if not job.finetune.is_lora:
        return
    whole, head = (Parallel.COLUMN_GATHERED, Parallel.ROW_SCATTERED), decoder.lm_head.name
    for op in decoder.blocks[0].ops:
        if isinstance(op, Linear) and op.parallel in whole and is_target(op, job.finetune, head):
            raise unsplit_adapters(job)


def whole_experts(job: Job) -> NotCoveredError:
    """The error for a mixture of experts."""
    return NotCoveredError(
        key="sequence_parallel",
        value="true",
        allowed=f"false: there is no plan for the experts of {job.model.model_type}",
    )


def unsplit_adapters(job: Job) -> NotCoveredError:
    """The error for such an adapter."""
    return NotCoveredError(
        key="sequence_parallel",
        value="true",
        allowed=f"false with LoRA: {job.model.model_type} gathers what its adapted Linears give",
    )
