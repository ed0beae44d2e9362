"""Where weights, gradients and optimizer states lie, per method, and which buffers that needs."""

from __future__ import annotations

from src.architecture import Decoder
from src.memory.counts import ModelCounts
from src.memory.placement.fsdp import FsdpPlacement, OffloadedFsdpPlacement
from src.memory.placement.whole import Placement
from src.memory.placement.zero import ZeroPlacement
from src.memory.regime import Regime
from src.spec import Job, Layout, Method, Offload

__all__ = ["FsdpPlacement", "OffloadedFsdpPlacement", "Placement", "ZeroPlacement", "place"]


def place(
    decoder: Decoder, job: Job, method: Method, layout: Layout, regime: Regime, counts: ModelCounts
) -> Placement:
    """The placement of a method."""
    kind = Placement
    if method.is_zero:
        kind = ZeroPlacement
    elif method.is_fsdp:
        kind = FsdpPlacement if job.offload is Offload.NONE else OffloadedFsdpPlacement
    return kind(
        decoder=decoder, job=job, method=method, layout=layout, regime=regime, counts=counts
    )
