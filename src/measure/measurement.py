"""What one measured step gives back: the row of a real CUDA GPU, or of one that ran out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from src.measure.cuda_statistics import DeviceBytes, Memory, Statistics, oom_numbers
from src.measure.events import Instant

MEASURED_STEP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What was on the GPU before the model was.

    Attributes:
        comm: who carries the collectives: `none` on one GPU, `nccl`; `fake` where this process was
            rank 0 of a group that sends nothing.
        bare: the device level with a CUDA context and nothing else.
        connected: the device level once the ranks have reached each other.
        memory: the allocator's statistics at that moment.
    """

    comm: str
    bare: DeviceBytes
    connected: DeviceBytes
    memory: Memory

    @property
    def context_bytes(self) -> int:
        """The CUDA context; where NVML hides processes, all that was used on the GPU."""
        return self.bare.num_bytes

    @property
    def communicator_bytes(self) -> int:
        """What connecting the ranks took outside the allocator."""
        taken = self.connected.num_bytes - self.bare.num_bytes - self.memory.reserved_bytes
        return max(0, taken)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Bytes of one GPU in the second optimizer step.

    Attributes:
        outcome: `ok`; `oom`; `invalid` where other processes used the GPU, or the driver lent host
            memory to it.
        source: `measured` if a CUDA GPU ran the step.
        start: what was on the GPU before the model was.
        allocated_peaks: most bytes of tensors per window.
        reserved_peaks: most bytes of segments per window.
        after_step_bytes: bytes of tensors once the step is over.
        memory: the allocator's statistics at the end.
        device: the device level at the end; None where the run did not get that far.
        step_seconds: wall time of the second step; None where it did not end.
        oom_instant: the window in which memory ran out.
        oom_message: CUDA's message.
        environment: GPU, driver, CUDA, allocator options.
        versions: library versions.
        notes: what the measurement took for granted.
        num_parameters: the model's own parameters, tied ones once, without adapters.
        num_trainable_parameters: those that are trained, adapters included.
    """

    outcome: str
    source: str
    start: Start
    allocated_peaks: Mapping[Instant, int]
    reserved_peaks: Mapping[Instant, int]
    after_step_bytes: int
    memory: Memory
    device: DeviceBytes | None
    step_seconds: float | None
    oom_instant: str | None = None
    oom_message: str | None = None
    environment: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_parameters: int = 0
    num_trainable_parameters: int = 0

    @property
    def outside_bytes(self) -> int | None:
        """Bytes on the GPU that the allocator does not hold: context, libraries, kernels."""
        if self.device is None:
            return None
        return self.device.num_bytes - self.memory.reserved_bytes

    def to_json(self) -> dict[str, object]:
        """The row, with the keys of a dry run's row where they mean the same."""
        peaks = {k: v for k, v in self.allocated_peaks.items() if k is not Instant.LOAD}
        peak_instant = max(peaks, key=lambda key: peaks[key], default=None)
        return {
            "outcome": self.outcome,
            "source": self.source,
            "comm": self.start.comm,
            "level": "allocated",
            "peak_bytes": max(peaks.values(), default=0),
            "peak_instant": None if peak_instant is None else peak_instant.value,
            "instant_peaks": _named(self.allocated_peaks),
            "instant_reserved_peaks": _named(self.reserved_peaks),
            "after_step_bytes": self.after_step_bytes,
            "step_seconds": self.step_seconds,
            "reservation": self._reservation(),
            "environment": dict(self.environment),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "num_parameters": self.num_parameters,
            "num_trainable_parameters": self.num_trainable_parameters,
        }

    def _reservation(self) -> dict[str, object]:
        peaks = [v for k, v in self.reserved_peaks.items() if k is not Instant.LOAD]
        reserved = max(peaks, default=self.memory.reserved_bytes)
        outside = self.outside_bytes
        numbers = None if self.oom_message is None else oom_numbers(self.oom_message)
        needed = None
        if numbers and {"process_bytes", "tried_bytes"} <= numbers.keys():
            needed = numbers["process_bytes"] + numbers["tried_bytes"]
        return {
            "reserved_bytes": reserved,
            "context_bytes": self.start.context_bytes,
            "communicator_bytes": self.start.communicator_bytes,
            "outside_bytes": outside,
            "device_bytes": None if outside is None else reserved + outside,
            "device_bytes_method": None if self.device is None else self.device.method,
            "num_other_processes_before": self.start.bare.num_others,
            "num_other_processes": None if self.device is None else self.device.num_others,
            "num_alloc_retries": self.memory.num_alloc_retries,
            "num_ooms": self.memory.num_ooms,
            "oom_instant": self.oom_instant,
            "oom_message": self.oom_message,
            "oom_numbers": numbers,
            "oom_needed_bytes": needed,
        }


def _named(peaks: Mapping[Instant, int]) -> dict[str, int]:
    return {instant.value: peaks[instant] for instant in Instant if instant in peaks}


class Watch:
    """Follows a run through the windows of its second step, and keeps each window's peaks.

    Peaks are reset whenever a window begins; a window that is entered again keeps its largest.

    Args:
        statistics: of the GPU that the run is on.
    """

    def __init__(self, statistics: Statistics) -> None:
        self.allocated_peaks: dict[Instant, int] = {}
        self.reserved_peaks: dict[Instant, int] = {}
        self.instant = Instant.LOAD
        self.step = 0
        self.num_blocks = 0
        self._statistics = statistics
        self._backward = False

    def step_begins(self, step: int) -> None:
        """Optimizer step number `step` begins; what came before it is closed."""
        self.close()
        self.step = step
        self.instant = Instant.FORWARD_END

    def enters(self, instant: Instant) -> None:
        """The window `instant` begins."""
        self._backward = instant is Instant.LOSS_BACKWARD
        self._move_to(instant)

    def reached_block(self, index: int) -> None:
        """The backward pass has reached block `index`; called by the autograd engine's thread."""
        if not self._backward:
            return
        if index == self.num_blocks - 1:
            self._move_to(Instant.LAST_BLOCK_BACKWARD)
        elif index == 0:
            self._move_to(Instant.FIRST_BLOCK_BACKWARD)
        else:
            self._move_to(Instant.MIDDLE_BLOCK_BACKWARD)

    def close(self, *, always: bool = False) -> None:
        """Keep the current window's peaks and start anew; in the first step only if `always`."""
        if always or self.step in (0, MEASURED_STEP):
            memory = self._statistics.memory()
            kept = self.allocated_peaks.get(self.instant, 0)
            self.allocated_peaks[self.instant] = max(kept, memory.peak_allocated_bytes)
            kept = self.reserved_peaks.get(self.instant, 0)
            self.reserved_peaks[self.instant] = max(kept, memory.peak_reserved_bytes)
        self._statistics.reset_peaks()

    def _move_to(self, instant: Instant) -> None:
        if instant is not self.instant:
            self.close()
            self.instant = instant
