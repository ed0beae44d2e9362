"""A simulation of PyTorch's CUDA caching allocator, without PyTorch and without a GPU."""

from src.measure.allocator.caching import CachingAllocator
from src.measure.allocator.config import AllocatorConfig
from src.measure.allocator.events import (
    AllocatorEvent,
    BlockState,
    BlockStatus,
    Gauge,
    OomReport,
    SegmentState,
    SimulatedOomError,
    Statistics,
    TraceAction,
    format_cuda_size,
)
from src.measure.allocator.replay import ReplayReport, recorded_config, replay_snapshot

__all__ = [
    "AllocatorConfig",
    "AllocatorEvent",
    "BlockState",
    "BlockStatus",
    "CachingAllocator",
    "Gauge",
    "OomReport",
    "ReplayReport",
    "SegmentState",
    "SimulatedOomError",
    "Statistics",
    "TraceAction",
    "format_cuda_size",
    "recorded_config",
    "replay_snapshot",
]
