"""Whose bytes a snapshot's blocks are, as far as the recorder, their stacks or their sizes tell.

A recorder that names the kind of bytes (the dry run's does) is believed. Else the stack decides,
where the innermost known function leaves no doubt; CUDA's backward pass runs in threads of the
autograd engine, which have no Python stack. Blocks without one are told by their size alone: those
as large as the model's tensors, as often as these exist, the logits, cuBLAS workspaces. What is
left stays without owner.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from src.architecture import describe, supported_model_types
from src.measure.events import Owner
from src.measure.recorded import Held
from src.memory.counts import Tensor, model_tensors
from src.memory.optimizers import BITSANDBYTES
from src.memory.parts import workspace_bytes
from src.memory.regime import adapter_bytes, stored_bytes
from src.memory.size import FLOAT_BYTES
from src.spec import Optimizer, Step
from src.units import ALLOCATION_GRANULARITY_BYTES

HALF_BYTES = 2
_BACKWARD = "backward"
_FORWARD = "forward"

FRAMES: tuple[tuple[str, str], ...] = (
    (r"(?i)cu(da)?blas", Owner.WORKSPACE),
    (r"torch/optim/\w+\.py:_init_group$", Owner.OPTIMIZER_STATES),
    (r"bitsandbytes/optim/\w+\.py:(init_state|get_state_buffer)$", Owner.OPTIMIZER_STATES),
    (r"(torch|bitsandbytes)/optim/|torch/nn/utils/clip_grad\.py:", Owner.TEMPORARIES),
    (r"_fsdp_param\.py:(alloc|init)_all_gather_outputs$", Owner.GATHERED_WEIGHTS),
    (r"_fsdp_collectives\.py:foreach_all_gather", Owner.GATHERED_WEIGHTS),
    (r"_fsdp_collectives\.py:foreach_reduce", Owner.COMMUNICATION_BUFFERS),
    (r"torch/nn/parallel/distributed\.py:_ddp_init_helper$", Owner.COMMUNICATION_BUFFERS),
    (r"loss/loss_utils\.py:|nn/functional\.py:cross_entropy$", Owner.LOGITS),
    (r"torch/nn/modules/module\.py:(_apply|to_empty)$", Owner.WEIGHTS),
    (r"transformers/(modeling_utils\.py:from_pretrained|core_model_loading\.py:)", Owner.WEIGHTS),
    (r"torch/utils/checkpoint\.py:(recompute_fn|unpack_hook)|/modeling_\w+\.py:", _FORWARD),
    (r"torch/nn/modules/\w+\.py:forward$", _FORWARD),
    (r"torch::autograd::Engine|torch/autograd/graph\.py:_engine_run_backward$", _BACKWARD),
)
"""Patterns of `file:function`, and what a block is whose innermost known frame is such a one."""

_PATTERNS = tuple((re.compile(pattern), owner) for pattern, owner in FRAMES)


class Evidence(StrEnum):
    """What says whose bytes a block holds."""

    RECORDER = "recorder"
    FRAMES = "frames"
    SIZES = "sizes"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Bytes by owner.

    Attributes:
        num_bytes: owner -> bytes.
        by_evidence: evidence -> bytes; `none`: of blocks without owner.
    """

    num_bytes: Mapping[Owner, int]
    by_evidence: Mapping[Evidence, int]

    @property
    def unattributed_bytes(self) -> int:
        """Bytes without owner."""
        return self.by_evidence.get(Evidence.NONE, 0)


def attribute(blocks: Sequence[Held], step: Step) -> Attribution:
    """Whose bytes the blocks of one moment are, if they are of this step.

    Args:
        blocks: the blocks.
        step: the step that was recorded; its model gives the sizes.
    """
    found: Counter[Owner] = Counter()
    evidence: Counter[Evidence] = Counter()
    has_frames = any(block.frames for block in blocks)
    sizes = _sizes(step)
    open_blocks: list[Held] = []
    backward: list[Held] = []
    for block in blocks:
        owner, why = _told(block, sizes, has_frames=has_frames)
        if owner == _BACKWARD:
            backward.append(block)
        elif owner is None:
            open_blocks.append(block)
        else:
            found[Owner(owner)] += block.num_bytes
            evidence[why] += block.num_bytes
    _take_backward(backward, sizes, found, evidence)
    _take_by_size(open_blocks, sizes, found, evidence)
    return Attribution(num_bytes=dict(found), by_evidence=dict(evidence))


def _told(block: Held, sizes: _Sizes, *, has_frames: bool) -> tuple[str | None, Evidence]:
    """An owner, the backward pass, or None; and what says so."""
    if block.category in list(Owner):
        return block.category, Evidence.RECORDER
    for frame in block.frames:
        owner = next((owner for pattern, owner in _PATTERNS if pattern.search(frame)), None)
        if owner == _FORWARD:
            is_logits = block.num_bytes in sizes.logits
            return Owner.LOGITS if is_logits else Owner.SAVED_ACTIVATIONS, Evidence.FRAMES
        if owner is not None:
            return owner, Evidence.FRAMES
    if has_frames and not block.frames and not block.is_early:
        return _BACKWARD, Evidence.FRAMES
    return None, Evidence.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Bytes of blocks that a step makes, as the allocator rounds them.

    Attributes:
        weights: block size -> how many parameters, as they are stored.
        trained: the same of those that are trained.
        num_states: states as large as the parameter, of each trained one.
        logits: sizes of the logits and of their copies.
        workspace: of cuBLAS.
    """

    weights: Mapping[int, int] = field(default_factory=dict)
    trained: Mapping[int, int] = field(default_factory=dict)
    num_states: int = 0
    logits: frozenset[int] = frozenset()
    workspace: int = 0


def _sizes(step: Step) -> _Sizes:
    job, method = step.job, step.method
    workspace = workspace_bytes(step.gpu)
    if job.model.model_type not in supported_model_types():
        return _Sizes(workspace=workspace)
    decoder = describe(job.model)
    front, blocks, behind = model_tensors(decoder, job.finetune, step.layout.tp)
    tensors = [*front, *(tensor for block in blocks for tensor in block), *behind]
    weights: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for tensor in tensors:
        size = _stored(tensor, step)
        weights[size] += 1
        if tensor.trained and not method.is_zero:
            trained[size] += 1
    optimizer = job.optimizer
    like_parameter = optimizer not in (*BITSANDBYTES, Optimizer.MUON) and not method.is_zero
    elements = step.micro_batch * decoder.vocab_size
    lengths = (job.model_seq_len, job.model_seq_len - 1)
    return _Sizes(
        weights=weights,
        trained=trained,
        num_states=optimizer.states_per_parameter if like_parameter else 0,
        logits=frozenset(
            _rounded(elements * length * width)
            for length in lengths
            for width in (HALF_BYTES, FLOAT_BYTES)
        ),
        workspace=workspace,
    )


def _stored(tensor: Tensor, step: Step) -> int:
    """Bytes of the block of a parameter as this GPU stores it."""
    job, method, shard = step.job, step.method, step.layout.shard
    dense, norm = stored_bytes(job)
    element = norm if tensor.is_norm else dense
    if job.precision.is_mixed and method.is_zero:
        element = HALF_BYTES
    if tensor.is_adapter:
        element = adapter_bytes(job.precision, method) if method.is_zero else FLOAT_BYTES
    if tensor.storage is not None:
        return _rounded(-(-tensor.storage.weight_bytes // (shard if method.is_fsdp else 1)))
    numel = tensor.shard(shard) if method.is_fsdp else tensor.numel
    return _rounded(round(numel * element))


def _rounded(num_bytes: int) -> int:
    unit = ALLOCATION_GRANULARITY_BYTES
    return -(-num_bytes // unit) * unit


def _take_backward(
    blocks: Iterable[Held], sizes: _Sizes, found: Counter[Owner], evidence: Counter[Evidence]
) -> None:
    """Of what the backward pass made: gradients are as large as parameters, each once."""
    left = Counter(sizes.trained)
    for block in blocks:
        size = block.num_bytes
        owner, why = Owner.TEMPORARIES, Evidence.FRAMES
        if size in sizes.logits:
            owner, why = Owner.LOGITS, Evidence.SIZES
        elif left[size] > 0:
            left[size] -= 1
            owner, why = Owner.GRADIENTS, Evidence.SIZES
        found[owner] += size
        evidence[why] += size


def _take_by_size(
    blocks: Iterable[Held], sizes: _Sizes, found: Counter[Owner], evidence: Counter[Evidence]
) -> None:
    """Blocks of which nothing but the size is known."""
    for size, count in Counter(block.num_bytes for block in blocks).items():
        left = count
        for owner, most in _candidates(size, count, sizes):
            taken = min(left, most)
            if taken:
                found[owner] += taken * size
                evidence[Evidence.SIZES] += taken * size
                left -= taken
        if left:
            evidence[Evidence.NONE] += left * size


def _candidates(size: int, count: int, sizes: _Sizes) -> list[tuple[Owner, int]]:
    """Whose `count` blocks of one size can be, and how many at most, the likeliest first.

    Weights are always there; states as large as they are come all at once, with the first step.
    """
    num_trained = sizes.trained.get(size, 0)
    num_weights, num_states = sizes.weights.get(size, 0), num_trained * sizes.num_states
    kept = [(Owner.OPTIMIZER_STATES, num_states), (Owner.GRADIENTS, num_trained)]
    if count < num_weights + num_states:
        kept.reverse()
    return [
        (Owner.WEIGHTS, num_weights),
        *kept,
        (Owner.LOGITS, count if size in sizes.logits else 0),
        (Owner.WORKSPACE, 2 if size == sizes.workspace else 0),
    ]
