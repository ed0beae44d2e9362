"""What one simulated step gives back: peaks, the ledger by owner and instant, and the events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from src.measure.events import Event, Instant, Owner
from src.measure.reservation import Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunResult:
    """Bytes of one GPU in the second optimizer step, at the allocated level (512 B blocks).

    Attributes:
        peak_bytes: largest live bytes of the step.
        peak_instant: the window in which that happens.
        instant_peaks: largest live bytes per window.
        ledger: live bytes by owner at each window's largest moment.
        after_step_bytes: live bytes once the step is over.
        num_events: allocations and frees of all steps.
        versions: library versions of the run.
        reservation: what the caching allocator holds, and whether the step fits on the GPU.
        notes: what the simulation assumed for this case.
        events: every allocation and free.
        measured_step: the optimizer step whose bytes these are.
        saved_on_host_bytes: saved tensors that wait in host memory between forward and backward.
        num_parameters: the model's own parameters, tied ones once, without adapters.
        num_trainable_parameters: those that are trained, adapters included.
    """

    peak_bytes: int
    peak_instant: Instant
    instant_peaks: Mapping[Instant, int]
    ledger: Mapping[Instant, Mapping[Owner, int]]
    after_step_bytes: int
    num_events: int
    versions: Mapping[str, str]
    reservation: Reservation | None = None
    notes: tuple[str, ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)
    source: str = "simulated"
    measured_step: int = 2
    saved_on_host_bytes: int = 0
    num_parameters: int = 0
    num_trainable_parameters: int = 0

    def to_json(self) -> dict[str, object]:
        """The result without its events, as plain JSON values."""
        return {
            "outcome": self.outcome,
            "source": self.source,
            "level": "allocated",
            "peak_bytes": self.peak_bytes,
            "peak_instant": self.peak_instant.value,
            "instant_peaks": {key.value: value for key, value in self.instant_peaks.items()},
            "ledger": {
                instant.value: {owner.value: value for owner, value in column.items()}
                for instant, column in self.ledger.items()
            },
            "after_step_bytes": self.after_step_bytes,
            "num_events": self.num_events,
            "versions": dict(self.versions),
            "reservation": self._reservation(),
            "notes": list(self.notes),
            "num_parameters": self.num_parameters,
            "num_trainable_parameters": self.num_trainable_parameters,
        }

    @property
    def outcome(self) -> str:
        """`oom` where the step does not fit on its GPU, else `ok`."""
        return "oom" if self.reservation is not None and self.reservation.oom else "ok"

    def _reservation(self) -> dict[str, object] | None:
        found = self.reservation
        if found is None:
            return None
        return {
            "reserved_bytes": found.reserved_bytes,
            "outside_bytes": found.outside_bytes,
            "device_bytes": found.device_bytes,
            "num_alloc_retries": found.num_alloc_retries,
            "oom_instant": found.oom_instant,
            "oom_message": None if found.oom is None else found.oom.message(),
            "oom_needed_bytes": None
            if found.oom is None
            else found.oom.process_bytes + found.oom.tried_bytes,
        }
