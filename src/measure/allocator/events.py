"""What the simulated allocator tells: its statistics, its trace, its state, and why it gave up."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from src.units import GIB, KIB, MIB


class TraceAction(StrEnum):
    """What happened, by the names of PyTorch's memory snapshots (`TraceEntry::Action`)."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    OOM = "oom"


class AllocatorEvent(NamedTuple):
    """One entry of the trace.

    Attributes:
        action: what happened.
        address: of the block or segment; for `oom` the bytes that the device had free.
        size: bytes asked for by the caller (blocks), or bytes of the segment or mapped range.
        stream: the stream of the block or segment.
    """

    action: TraceAction
    address: int
    size: int
    stream: int


class BlockStatus(StrEnum):
    """State of a block, by the names of PyTorch's memory snapshots."""

    ALLOCATED = "active_allocated"
    PENDING_FREE = "active_pending_free"
    INACTIVE = "inactive"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockState:
    """One block of a segment.

    Attributes:
        address: first byte.
        size: bytes.
        requested_bytes: bytes the caller asked for; 0 for an inactive block.
        status: allocated, freed but waiting for another stream, or cached.
    """

    address: int
    size: int
    requested_bytes: int
    status: BlockStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentState:
    """One contiguous range of device memory and the blocks that partition it.

    Attributes:
        address: first byte.
        size: bytes.
        stream: the stream its blocks belong to.
        is_small: of the small pool.
        is_expandable: a mapped range of an expandable segment.
        blocks: by address.
    """

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockState, ...]


@dataclass(slots=True)
class Gauge:
    """A number of bytes now, and its highest value since the last reset."""

    current: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        """Change the current value by `num_bytes`, which may be negative."""
        self.current += num_bytes
        if self.current > self.peak:
            self.peak = self.current


@dataclass(slots=True, kw_only=True)
class Statistics:
    """The figures of `torch.cuda.memory_stats`.

    Attributes:
        allocated_bytes: blocks in use, at their rounded size; `torch.cuda.memory_allocated`.
        reserved_bytes: segments held; `torch.cuda.memory_reserved`.
        active_bytes: blocks in use, or freed and still waiting for another stream.
        requested_bytes: what the callers of the active blocks asked for, unrounded.
        num_segments: segments held that are not expandable.
        num_alloc_retries: times that the whole cache was released because the device was full.
        num_ooms: requests that failed even so.
        num_device_allocs: calls of cudaMalloc or of page mapping that succeeded.
        num_device_frees: calls of cudaFree or of page unmapping.
    """

    allocated_bytes: Gauge = field(default_factory=Gauge)
    reserved_bytes: Gauge = field(default_factory=Gauge)
    active_bytes: Gauge = field(default_factory=Gauge)
    requested_bytes: Gauge = field(default_factory=Gauge)
    num_segments: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_device_allocs: int = 0
    num_device_frees: int = 0

    def reset_peak(self) -> None:
        """Every peak becomes the current value (`reset_peak_memory_stats`)."""
        for gauge in (
            self.allocated_bytes,
            self.reserved_bytes,
            self.active_bytes,
            self.requested_bytes,
        ):
            gauge.peak = gauge.current


def format_cuda_size(num_bytes: int) -> str:
    """Bytes as PyTorch's error messages print them (`format_size`)."""
    if num_bytes <= KIB:
        return f"{num_bytes} bytes"
    for unit, name in ((MIB, "KiB"), (GIB, "MiB")):
        if num_bytes <= unit:
            return f"{num_bytes / (unit // KIB):.2f} {name}"
    return f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class OomReport:
    """The numbers of CUDA's out-of-memory message, in bytes.

    Attributes:
        requested_bytes: what the caller asked for, unrounded.
        tried_bytes: the segment that the allocator tried to get; the message's "Tried to allocate".
        capacity_bytes: total memory of the device.
        free_bytes: what the device had left.
        process_bytes: what the process holds, outside the allocator and in it.
        allowed_bytes: the limit that `per_process_memory_fraction` sets; None without one.
        allocated_bytes: blocks in use.
        reserved_bytes: segments held.
    """

    requested_bytes: int
    tried_bytes: int
    capacity_bytes: int
    free_bytes: int
    process_bytes: int
    allowed_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int

    @property
    def unallocated_bytes(self) -> int:
        """Reserved by PyTorch but unallocated."""
        return self.reserved_bytes - self.allocated_bytes

    def message(self, *, device: int = 0) -> str:
        """The text that `torch.OutOfMemoryError` would have on GPU `device`."""
        allowed = "" if self.allowed_bytes is None else f"{_size(self.allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.tried_bytes)}. GPU {device} has a "
            f"total capacity of {_size(self.capacity_bytes)} of which {_size(self.free_bytes)} is "
            f"free. Including non-PyTorch memory, this process has {_size(self.process_bytes)} "
            f"memory in use. {allowed}Of the allocated memory {_size(self.allocated_bytes)} is "
            f"allocated by PyTorch, and {_size(self.unallocated_bytes)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/"
            "cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


_size = format_cuda_size


class SimulatedOomError(Exception):
    """A request that fits nowhere on the simulated device; an outcome, not a fault of the input.

    Attributes:
        report: the numbers of CUDA's message.
    """

    def __init__(self, report: OomReport) -> None:
        super().__init__(report.message())
        self.report = report
