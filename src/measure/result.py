"""What one simulated step gives back: peaks, the ledger by owner and instant, and the events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Instant(StrEnum):
    """A window of the training step; bytes are the largest within it.

    `load`: before the first step. `forward_end`: from the batch's arrival to the call of
    `backward()`. `loss_backward`: until the last block's output has its gradient.
    `last_block_backward`, `middle_block_backward`, `first_block_backward`: from there, by the block
    whose output gradient was computed (or whose recomputation began) last; the first block's window
    ends with `backward()` and so holds the embedding's gradient. `gradient_sync`: clipping and what
    else precedes the optimizer. `optimizer_step`: `optimizer.step()` and `zero_grad()`.
    """

    LOAD = "load"
    FORWARD_END = "forward_end"
    LOSS_BACKWARD = "loss_backward"
    LAST_BLOCK_BACKWARD = "last_block_backward"
    MIDDLE_BLOCK_BACKWARD = "middle_block_backward"
    FIRST_BLOCK_BACKWARD = "first_block_backward"
    GRADIENT_SYNC = "gradient_sync"
    OPTIMIZER_STEP = "optimizer_step"


class Owner(StrEnum):
    """Whose bytes a storage holds.

    `weights` are parameters and buffers as stored (sharded where they are); `gathered_weights`
    their whole copies under FSDP; `cast_weights` autocast's copies. `saved_activations` were born
    in a forward pass (or its recomputation) and outlived it; `logits` are those with the vocabulary
    as last dimension, and their gradients. `temporaries` are everything else. `workspace` bytes are
    invisible to a trace of tensors: cuBLAS handles, accumulators inside kernels.
    """

    WEIGHTS = "weights"
    GATHERED_WEIGHTS = "gathered_weights"
    CAST_WEIGHTS = "cast_weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    INPUTS = "inputs"
    SAVED_ACTIVATIONS = "saved_activations"
    LOGITS = "logits"
    TEMPORARIES = "temporaries"
    COMMUNICATION_BUFFERS = "communication_buffers"
    WORKSPACE = "workspace"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One allocation or free, in the order in which they happen.

    Attributes:
        block: number of the block; an allocation and its free share it.
        num_bytes: bytes asked for, before the allocator rounds; 0 frees the block.
        stream: stream the block belongs to; 0 is the compute stream.
        instant: window of the step.
        owner: whose bytes.
        step: optimizer step, 0 while loading.
    """

    block: int
    num_bytes: int
    stream: int
    instant: Instant
    owner: Owner
    step: int


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
        notes: what the simulation assumed for this case.
        events: every allocation and free.
    """

    peak_bytes: int
    peak_instant: Instant
    instant_peaks: Mapping[Instant, int]
    ledger: Mapping[Instant, Mapping[Owner, int]]
    after_step_bytes: int
    num_events: int
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)
    source: str = "simulated"

    def to_json(self) -> dict[str, object]:
        """The result without its events, as plain JSON values."""
        return {
            "outcome": "ok",
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
            "notes": list(self.notes),
        }
