"""The words of a trace: windows of the step, owners of bytes, and one event."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Instant(StrEnum):
    """A window of the training step; bytes are the largest within it.

    `load`: before the first step. `forward_end`: from the batch's arrival to the call of
    `backward()`. `loss_backward`: until the last block's output has its gradient.
    `last_block_backward`, `middle_block_backward`, `first_block_backward`: from there, by the block
    whose output gradient was computed (or whose recomputation began) last; the first block's window
    ends with the graph and so holds the embedding's gradient. `gradient_sync`: what methods reduce
    behind the graph (FSDP its root), clipping and what else precedes the optimizer.
    `optimizer_step`: `optimizer.step()` and `zero_grad()`.
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
        used_by: of a free: other streams that may still use the block (`record_stream`).
    """

    block: int
    num_bytes: int
    stream: int
    instant: Instant
    owner: Owner
    step: int
    used_by: tuple[int, ...] = ()
