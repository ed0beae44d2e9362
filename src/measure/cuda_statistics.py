"""What a real CUDA GPU says about memory: the allocator's statistics, and the process's bytes."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from src.units import GIB, KIB, MIB


class Statistics(Protocol):
    """The memory statistics of one GPU; `TorchStatistics` asks CUDA, tests make their own."""

    def reset_peaks(self) -> None:
        """Peaks become the current values."""

    def memory(self) -> Memory:
        """Bytes now, and the peaks since `reset_peaks`."""

    def device(self) -> DeviceBytes:
        """Bytes of the process on the GPU now."""

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was queued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The caching allocator's statistics.

    Attributes:
        allocated_bytes: bytes of tensors now.
        reserved_bytes: bytes of segments now.
        peak_allocated_bytes: most bytes of tensors since the last reset.
        peak_reserved_bytes: most bytes of segments since the last reset.
        num_alloc_retries: times the cache was released to make room, since the process began.
        num_ooms: allocations that failed, since the process began.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int = 0
    num_ooms: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """The device level.

    Attributes:
        num_bytes: bytes of this process; with `mem_get_info` of everything on the GPU.
        method: `nvml` or `mem_get_info`.
        num_others: other processes that compute on the GPU; None where that cannot be seen.
    """

    num_bytes: int
    method: str
    num_others: int | None


class TorchStatistics:
    """A visible GPU, through `torch.cuda` and, where it is installed, NVML.

    Args:
        index: which of the visible ones.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._handle = _nvml_handle(index)

    def reset_peaks(self) -> None:
        """Peaks become the current values (`reset_peak_memory_stats`)."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def memory(self) -> Memory:
        """Bytes now, and the peaks since `reset_peaks`."""
        found = torch.cuda.memory_stats(self._index)
        return Memory(
            allocated_bytes=found["allocated_bytes.all.current"],
            reserved_bytes=found["reserved_bytes.all.current"],
            peak_allocated_bytes=found["allocated_bytes.all.peak"],
            peak_reserved_bytes=found["reserved_bytes.all.peak"],
            num_alloc_retries=found["num_alloc_retries"],
            num_ooms=found["num_ooms"],
        )

    def device(self) -> DeviceBytes:
        """This process's bytes by NVML; where NVML does not tell, all that is used on the GPU."""
        found = None if self._handle is None else _nvml_process(self._handle)
        if found is not None:
            return found
        free, total = torch.cuda.mem_get_info(self._index)
        return DeviceBytes(num_bytes=total - free, method="mem_get_info", num_others=None)

    def synchronize(self) -> None:
        """Wait until the GPU has done all that was queued."""
        torch.cuda.synchronize(self._index)


def _nvml_handle(index: int) -> Any:
    """NVML's handle of a visible GPU; None without `pynvml` or where it refuses."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except (nvml.NVMLError, AttributeError):
        return None


def _nvml_process(handle: Any) -> DeviceBytes | None:
    """This process on the GPU; None in containers and on MIG devices that hide processes."""
    nvml: Any = importlib.import_module("pynvml")
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    return own_process({p.pid: p.usedGpuMemory for p in processes}, pid=os.getpid())


def own_process(used: Mapping[int, int | None], *, pid: int) -> DeviceBytes | None:
    """The bytes of process `pid` among NVML's answers; None if it or its bytes are not there."""
    num_bytes = used.get(pid)
    if num_bytes is None:
        return None
    return DeviceBytes(num_bytes=num_bytes, method="nvml", num_others=len(used) - 1)


def driver_version() -> str | None:
    """The NVIDIA driver's version; None without `pynvml`."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # every failure of this optional library means the same
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_MESSAGE = {
    "tried_bytes": f"Tried to allocate {_SIZE}",
    "capacity_bytes": f"total capacity of {_SIZE}",
    "free_bytes": f"of which {_SIZE} is free",
    "process_bytes": f"his process has {_SIZE} memory in use",
    "allocated_bytes": f"Of the allocated memory {_SIZE} is allocated by PyTorch",
    "unallocated_bytes": f"and {_SIZE} is reserved by PyTorch but unallocated",
}


def oom_numbers(message: str) -> dict[str, int]:
    """The numbers of CUDA's out-of-memory message in bytes; those it does not have are left out."""
    found = {}
    for name, pattern in _MESSAGE.items():
        match = re.search(pattern, message)
        if match is not None:
            found[name] = round(float(match[1]) * _UNITS[match[2]])
    return found
