"""From `allocated` to `reserved` and `device`, and the upper bound of each.

FIRST MODELS. Every constant below is a plain figure that no fit to runs has replaced yet; reports
carry a wide upper bound because of them. They come from 158 published A100-80 runs that state both
`max_memory_allocated` and nvidia-smi's peak (fms-acceleration's benchmark files): nvidia-smi over
allocated has a median of 1.16 on one GPU and 1.29 with FSDP, tending to 1.02 where the card is
full, because the allocator gives its cache back before it fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.spec import Gpu, Layout, Method
from src.units import MIB, Levels

SLACK_ONE_STREAM = 0.13
"""Share of allocated that the allocator holds beyond it, where it need not give anything back."""

SLACK_SEVERAL_STREAMS = 0.25
"""The same where all-gather and reduce-scatter run on streams, and so pools, of their own."""

SLACK_AT_CAPACITY = 0.015
"""What fragmentation still costs once the cache has been given back."""

UPPER_SLACK_AT_CAPACITY = 0.05
"""The same in the upper bound: replays of nearly full cards through the simulated allocator fail
where single blocks of the logits take a quarter of the card."""

CONTEXT_MIB_PER_SM = 4.5
"""CUDA context where nobody measured it: 481 MiB on an A100 (108 SMs), 601 on an H100 NVL (132)."""

NCCL_BYTES_PER_COMMUNICATOR = 400 * MIB
"""Channels and buffers of one NCCL communicator."""

UPPER_ALLOCATED = 0.05
"""Margin of the upper bound on allocated bytes, until it is calibrated."""

UPPER_OUTSIDE = 0.25
"""Margin of the upper bound on context and NCCL bytes, until it is calibrated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelModel:
    """The first models for one GPU model and method.

    Attributes:
        capacity: usable bytes of the GPU.
        outside: bytes that the process holds outside the allocator: CUDA context and NCCL.
        slack: `SLACK_ONE_STREAM` or `SLACK_SEVERAL_STREAMS`.
    """

    capacity: int
    outside: int
    slack: float

    def estimate(self, allocated: int) -> Levels:
        """All levels for an allocated peak in bytes."""
        return self._levels(allocated, self.outside, least_slack=SLACK_AT_CAPACITY)

    def upper(self, allocated: int, *, fragmented: int = 0) -> Levels:
        """The upper bound of all levels; never below the estimate.

        Args:
            allocated: the estimated peak in bytes.
            fragmented: allocated bytes and stranded blocks of another moment, where they are more.
        """
        outside = round(self.outside * (1 + UPPER_OUTSIDE))
        grown = round(allocated * (1 + UPPER_ALLOCATED))
        bound = self._levels(grown, outside, least_slack=UPPER_SLACK_AT_CAPACITY)
        stranded = round(fragmented * (1 + UPPER_ALLOCATED))
        estimate = self.estimate(allocated)
        return Levels(
            allocated=bound.allocated,
            reserved=max(bound.reserved, estimate.reserved, stranded),
            device=max(bound.device, estimate.device, stranded + outside),
        )

    def _levels(self, allocated: int, outside: int, *, least_slack: float) -> Levels:
        least = allocated * (1 + least_slack)
        free_of_pressure = allocated * (1 + self.slack)
        reserved = round(min(free_of_pressure, max(least, self.capacity - outside)))
        return Levels(allocated=allocated, reserved=reserved, device=reserved + outside)


def context_bytes(gpu: Gpu) -> int:
    """CUDA context of one process: measured where it is known, else by the number of SMs."""
    if gpu.context_bytes is not None:
        return gpu.context_bytes
    return round(gpu.sm_count * CONTEXT_MIB_PER_SM * MIB)


def num_communicators(layout: Layout) -> int:
    """NCCL communicators of one rank: one for data parallelism, one for tensor parallelism."""
    return (layout.dp > 1) + (layout.tp > 1)


def level_model(method: Method, layout: Layout, gpu: Gpu) -> LevelModel:
    """The first models for a method and layout on a GPU model."""
    several_streams = method.is_fsdp or method.is_zero
    nccl = num_communicators(layout) * NCCL_BYTES_PER_COMMUNICATOR
    return LevelModel(
        capacity=gpu.usable_bytes,
        outside=context_bytes(gpu) + nccl,
        slack=SLACK_SEVERAL_STREAMS if several_streams else SLACK_ONE_STREAM,
    )
