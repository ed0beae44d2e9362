"""Byte units, the three levels a number of bytes can speak of, and how bytes are printed."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024**2
GIB = 1024**3

ALLOCATION_GRANULARITY_BYTES = 512
"""PyTorch rounds every block up to this size (c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Bytes on one GPU at each level.

    Attributes:
        allocated: tensors; `torch.cuda.max_memory_allocated`.
        reserved: what the caching allocator holds; `torch.cuda.max_memory_reserved`.
        device: what NVML sees for the process: reserved, CUDA context, NCCL, libraries.
    """

    allocated: int
    reserved: int
    device: int


def gib_to_bytes(gib: float) -> int:
    """GiB to whole bytes."""
    return round(gib * GIB)


def format_gib(num_bytes: float, *, digits: int = 2) -> str:
    """Bytes as GiB for people: `12.34 GiB`."""
    return f"{num_bytes / GIB:.{digits}f} GiB"
