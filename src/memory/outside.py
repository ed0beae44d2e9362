"""Bytes of a process on its GPU that no allocator holds: CUDA context and NCCL.

The one place for them: the formula and the dry run add them to what is reserved, and campaigns
measure them (`Gpu.context_mib`).
"""

from __future__ import annotations

from src.spec import Gpu, Layout
from src.units import MIB

CONTEXT_MIB_PER_SM = 4.5
"""CUDA context where nobody measured it: 481 MiB on an A100 (108 SMs), 601 on an H100 NVL (132).
Of a PyTorch process that loads kernels when they are first used, as it does unless told otherwise;
one that loads all of them at the start has 942 MiB on an A100 (stas00/ml-engineering,
training/performance)."""

NCCL_FIRST_BYTES = 1485 * MIB
"""NCCL's kernels, and channels and buffers of a process' first communicator: 563 MiB before the
first barrier of two A100-SXM and 2,048 after it (stas00/ml-engineering, training/performance)."""

NCCL_PAIR_BYTES = 544 * MIB
NCCL_GROUP_BYTES = 688 * MIB
"""Channels and buffers of a further communicator of two GPUs, and of more: NCCL issue 964, on four
A100 with NVLink. They follow the number of channels, which follows the links."""


def context_bytes(gpu: Gpu) -> int:
    """CUDA context of one process: measured where it is known, else by the number of SMs."""
    if gpu.context_bytes is not None:
        return gpu.context_bytes
    return round(gpu.sm_count * CONTEXT_MIB_PER_SM * MIB)


def communicators(layout: Layout) -> tuple[int, ...]:
    """Sizes of a rank's NCCL communicators: replicas, shards, tensor parallelism."""
    sizes = (layout.dp // layout.shard, layout.shard, layout.tp)
    return tuple(size for size in sizes if size > 1)


def nccl_bytes(layout: Layout) -> int:
    """NCCL's bytes of one rank."""
    sizes = communicators(layout)
    if not sizes:
        return 0
    further = (NCCL_PAIR_BYTES if size == 2 else NCCL_GROUP_BYTES for size in sizes[1:])
    return NCCL_FIRST_BYTES + sum(further)


def outside_bytes(gpu: Gpu, layout: Layout) -> int:
    """Context and NCCL of one rank."""
    return context_bytes(gpu) + nccl_bytes(layout)
