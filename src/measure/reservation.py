"""From a trace to what the GPU sees: the events replayed through the caching allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.measure.allocator import AllocatorConfig, CachingAllocator, OomReport, SimulatedOomError
from src.measure.events import Event
from src.measure.stream_use import StreamUse
from src.memory.outside import outside_bytes
from src.spec import Gpu, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """What the allocator holds for a trace.

    Attributes:
        reserved_bytes: most bytes of segments in the step that counts;
            `torch.cuda.max_memory_reserved` since the step before.
        outside_bytes: CUDA context and NCCL, as assumed or as the GPU's description has them.
        oom: the numbers of CUDA's message where the trace does not fit; None where it does.
        oom_instant: the window in which that happens.
        num_alloc_retries: times the whole cache was released to make room.
    """

    reserved_bytes: int
    outside_bytes: int
    oom: OomReport | None
    oom_instant: str | None
    num_alloc_retries: int

    @property
    def device_bytes(self) -> int:
        """What NVML sees for the process."""
        return self.reserved_bytes + self.outside_bytes


def reserve(
    events: Sequence[Event],
    *,
    gpu: Gpu,
    layout: Layout,
    measured_step: int,
    config: AllocatorConfig | None = None,
) -> Reservation:
    """Replay `events` on a GPU of `gpu`'s capacity.

    A block that does not fit ends the replay, as it ends a real run: the figures are those up to
    there.
    """
    outside = outside_bytes(gpu, layout)
    allocator = CachingAllocator(
        config=config, capacity_bytes=gpu.usable_bytes, outside_bytes=outside
    )
    replay = StreamUse(allocator)
    step = 0
    oom: OomReport | None = None
    where: str | None = None
    for event in events:
        if event.step != step:
            step = event.step
            if step == measured_step:
                allocator.statistics.reset_peak()
        try:
            replay.apply(event)
        except SimulatedOomError as error:
            oom, where = error.report, event.instant.value
            break
    return Reservation(
        reserved_bytes=allocator.statistics.reserved_bytes.peak,
        outside_bytes=outside,
        oom=oom,
        oom_instant=where,
        num_alloc_retries=allocator.statistics.num_alloc_retries,
    )
