"""Where weights, gradients and optimizer states lie, per method, and which buffers that needs."""

from __future__ import annotations

from src.architecture import Decoder
from src.memory.counts import ModelCounts
from src.memory.placement.fsdp import FsdpPlacement, OffloadedFsdpPlacement
from src.memory.placement.whole import Placement
from src.memory.placement.zero import ZeroPlacement
from src.memory.placement.zero3 import Zero3Placement
from src.memory.placement.zero_bf16 import Bf16Placement
from src.memory.regime import Regime
from src.spec import Job, Layout, Method, Offload, Precision

__all__ = [
    "FsdpPlacement",
    "OffloadedFsdpPlacement",
    "Placement",
    "Zero3Placement",
    "ZeroPlacement",
    "place",
]


def place(
    decoder: Decoder, job: Job, method: Method, layout: Layout, regime: Regime, counts: ModelCounts
) -> Placement:
    """The placement of a method."""
    kind = Placement
    if method.is_zero:
        kind = _zero_kind(job, method)
    elif method.is_fsdp:
        kind = FsdpPlacement if job.offload is Offload.NONE else OffloadedFsdpPlacement
    return kind(
        decoder=decoder, job=job, method=method, layout=layout, regime=regime, counts=counts
    )


def _zero_kind(job: Job, method: Method) -> type[ZeroPlacement]:
    """The optimizer that DeepSpeed's engine takes."""
    if method is Method.ZERO3:
        return Zero3Placement
    in_fp32 = job.zero.fp32_gradients and job.precision is Precision.BF16_MIXED
    if in_fp32 and method is Method.ZERO1 and job.offload is Offload.NONE:
        return Bf16Placement
    return ZeroPlacement
