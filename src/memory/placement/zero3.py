"""DeepSpeed's ZeRO stage 3: every tensor cut into N, whole ones fetched ahead.

Source: `deepspeed/runtime/zero/stage3.py`, `partitioned_param_coordinator.py`,
`partition_parameters.py`, release 0.19.8, and runs of it, from the third micro step on: then the
engine knows the order in which weights are needed. Letters as in `zero.py`; t the sum of every
trained tensor's N-th part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from src.memory.counts import Counts, Tensor
from src.memory.optimizers import temporary_bytes
from src.memory.placement.partitions import (
    EMBEDDINGS,
    Placed,
    Reduction,
    pinned_bytes,
    placed_tensors,
    prefetched,
)
from src.memory.placement.zero import NORM_BYTES, ZeroPlacement
from src.memory.size import FLOAT_BYTES, ZERO, Size, fixed
from src.memory.terms import Term
from src.memory.values import Terms
from src.spec import Checkpointing, Offload, Precision

SUB_GROUP = 10**9
"""Elements that are stepped at once (`sub_group_size`)."""
REUSE_DISTANCE = 10**9
"""Elements within whose use a tensor is kept to be used again (`stage3_max_reuse_distance`)."""
NORM_SLICE = 250_000_000
"""Elements whose norm is taken at once (`_constant_buffered_norm2`)."""


@dataclass(frozen=True, kw_only=True)
class Zero3Placement(ZeroPlacement):
    """Stage 3."""

    @cached_property
    def tensors(self) -> tuple[Placed, ...]:
        """Every parameter, frozen ones included."""
        finetune, bytes_ = self.job.finetune, self.model_bytes
        return placed_tensors(self.decoder, finetune, element_bytes=bytes_)

    @cached_property
    def fetched(self) -> tuple[Placed, ...]:
        """Those that are not always whole: above `param_persistence_threshold`."""
        threshold = self.job.zero.param_persistence_threshold
        return tuple(tensor for tensor in self.tensors if tensor.numel > threshold)

    @cached_property
    def partition(self) -> int:
        """Elements t."""
        return sum(self._shard(tensor) for tensor in self.tensors if tensor.trained)

    def _shard(self, tensor: Placed) -> int:
        return -(-tensor.numel // self.layout.shard)

    @property
    def largest_shard(self) -> int:
        """Elements of the largest trained tensor's N-th part."""
        return -(-self.largest // self.layout.shard)

    @property
    def offloads_weights(self) -> bool:
        """Whether the parts of the weights are in host memory, too."""
        return self.job.offload is Offload.ALL

    @property
    def is_always_whole(self) -> bool:
        """Whether a tensor's part is the tensor, and on the GPU: nothing is fetched."""
        return self.layout.shard == 1 and not self.offloads_weights

    def weights(self) -> float:
        """`p` times every tensor's N-th part; in host memory where those are.

        Scales of quantised weights, which the engine does not see, are whole.
        """
        scales = self.counts.all.statistics_bytes
        if self.offloads_weights:
            return scales
        return self.model_bytes * sum(map(self._shard, self.tensors)) + scales

    def static(self) -> Terms:
        """Parts of weights and fp32 copy, states, a flat buffer of gradients `g t`, the bucket."""
        bucket = self.job.zero.reduce_bucket_size * self.reduced_bytes
        terms = {
            Term.WEIGHTS: fixed(self.weights()),
            Term.COMMUNICATION_BUFFERS: fixed(bucket),
        }
        if self.offloads:
            return terms
        return {
            **terms,
            Term.MASTER_WEIGHTS: fixed(self.partition * FLOAT_BYTES),
            Term.OPTIMIZER_STATES: fixed(self.optimizer_states()),
            Term.GRADIENTS: fixed(self.partition * self.accumulated_bytes),
        }

    def host(self) -> Size:
        """Page-locked: fp32 gradient, flat gradients; with weights, those too.

        Pageable: the fp32 partition, the states, and the partition in half precision on its way
        back to the GPU (copies between devices are cast on the host).
        """
        p, t = self.model_bytes, self.partition
        if not self.offloads:
            return fixed(0)
        total = pinned_bytes(FLOAT_BYTES * t) + pinned_bytes(self.accumulated_bytes * t)
        total += FLOAT_BYTES * t + self.optimizer_states()
        if self.offloads_weights:
            frozen = [p * self._shard(tensor) for tensor in self.tensors if not tensor.trained]
            total += pinned_bytes(p * t) + sum(map(pinned_bytes, frozen))
        elif p != FLOAT_BYTES:
            total += p * t
        return fixed(total)

    def backward_buffers(self) -> Terms:
        """None: the bucket is always there."""
        return {}

    def kept_gradients(self, part: Counts) -> float:
        """In the flat buffer."""
        del part
        return 0.0

    def reduced_gradients(self, index: int) -> float:
        """In the flat buffer."""
        del index
        return 0.0

    def waiting_gradients(self) -> Terms:
        """In the flat buffer."""
        return {}

    @property
    def keeps_gradients_between_steps(self) -> bool:
        """They are in the flat buffer."""
        return False

    def reduction_bytes(self, one: Reduction) -> float:
        """The bucket rank by rank, the part that is left cast to the buffer's dtype.

        The bucket has the dtype of the reduction; a tensor larger than it keeps its own gradient
        and is cast.
        """
        c, p, g = self.reduced_bytes, self.model_bytes, self.accumulated_bytes
        joined = one.tensors > 1 or bool(one.elements % self.layout.shard)
        bytes_ = c * joined + (g / self.layout.shard if c != g else 0)
        if self._is_oversized(one):
            bytes_ += p + (c if c != p else 0)
        return one.elements * bytes_

    def sync(self) -> tuple[Terms, ...]:
        """The last emptying of the bucket, the embeddings still whole.

        Offloaded: the part of one tensor after the other comes back for its norm, in fp64.
        """
        last = self.reduction_bytes(self.reductions[-1])
        part = 0
        if self.offloads:
            norm = NORM_BYTES * min(self.largest_shard, NORM_SLICE)
            part = self.accumulated_bytes * self.largest_shard + norm
        return (
            {
                Term.GATHERED_WEIGHTS: self.gathered_edges(),
                Term.COMMUNICATION_BUFFERS: fixed(last),
                Term.OPTIMIZER_TEMPORARIES: fixed(part),
            },
        )

    @cached_property
    def persistent(self) -> float:
        """Bytes of the small tensors, always whole outside the optimizer's step."""
        if self.is_always_whole:
            return 0.0
        whole = sum(tensor.numel for tensor in self.tensors)
        return float(self.model_bytes * (whole - _numel(self.fetched)))

    @cached_property
    def live(self) -> int:
        """Most elements that are whole at once.

        The engine fetches ahead until `max_live_parameters` are whole, whatever they are for, the
        last tensor overshooting.
        """
        inside = [tensor.numel for tensor in self.fetched if self._is_inside(tensor)]
        ahead = self.job.zero.max_live_parameters + max(inside, default=0)
        return min(_numel(self.fetched), max(ahead, self.reused))

    @cached_property
    def reused(self) -> int:
        """Elements that the forward pass leaves whole for the backward pass.

        Those used again within `REUSE_DISTANCE`: the head's, and of the last blocks as many as fit
        into what the head leaves of that distance in its two passes; blocks take two passes, three
        where they are recomputed.
        """
        head = self.table if self.regime.tied else self._at(self.decoder.num_layers)
        passes = 2 if self.job.checkpointing is Checkpointing.NONE else 3
        left = max(REUSE_DISTANCE - 2 * head, 0) // passes
        return head + min(left, sum(t.numel for t in self.fetched if self._is_inside(t)))

    @property
    def table(self) -> int:
        """Elements of the token embedding."""
        return self.decoder.token_embedding.rows * self.decoder.token_embedding.width

    def _at(self, block: int) -> int:
        return sum(tensor.numel for tensor in self.fetched if tensor.block == block)

    def _is_inside(self, tensor: Placed) -> bool:
        return EMBEDDINGS < tensor.block < self.decoder.num_layers

    def _gathered(self, elements: float) -> Size:
        """Bytes of whole tensors, beside the parts; on one GPU copies of what the host has."""
        if self.is_always_whole:
            return ZERO
        return fixed(self.model_bytes * elements + self.persistent)

    def gathered_moments(self) -> tuple[tuple[int, Size], ...]:
        """Buffers of what was fetched together live until the last of it has been used.

        A tensor fetched alone is its own buffer, and so is every one that a single GPU fetches from
        the host.
        """
        if self.layout.shard == 1:
            return ()
        groups = prefetched(self.fetched, self.job.zero.prefetch_bucket_size)
        found = [(_numel(group), group[-1].block) for group in groups if len(group) > 1]
        buffer = self._forwarding_shards()
        last = self.decoder.num_layers
        chosen = {max(found, key=lambda one: one[0]), found[-1]} if found else set()
        return tuple(
            (min(max(block, 0), last), self._gathered(self.live + numel + buffer))
            for numel, block in sorted(chosen)
        )

    def _forwarding_shards(self) -> float:
        """Elements of parts on their way from the host to be gathered."""
        if not self.offloads_weights:
            return 0.0
        groups = prefetched(self.fetched, self.job.zero.prefetch_bucket_size)
        return max((_numel(group) / self.layout.shard for group in groups), default=0.0)

    def gathered_forward(self) -> Size:
        """See `live`."""
        return self._gathered(self.live)

    def gathered_backward(self, index: int) -> Size:
        """Whatever is still to be used, as far as it is live.

        What has to be fetched again is held twice while it comes into use: one group, and as much
        as a tied table, which the head's backward pass lets go of at once.
        """
        left = sum(tensor.numel for tensor in self.fetched if tensor.block <= index)
        again = 0
        if _numel(self.fetched) > self.live:
            bucket = self.job.zero.prefetch_bucket_size
            again = max(_numel(group) for group in prefetched(self.fetched, bucket))
            again += self.table if self.regime.tied else 0
        return self._gathered(min(left, self.live + again))

    def gathered_edges(self) -> Size:
        """The embeddings: no backward pass of theirs lets go of them."""
        return self._gathered(self._at(EMBEDDINGS))

    def steps(self) -> tuple[Terms, ...]:
        """Overflow check (fp16), norm, gradients joined and in fp32, optimizer; by groups."""
        if self.offloads:
            return ({},)
        t, g = min(self.partition, SUB_GROUP + self.largest_shard), self.accumulated_bytes
        group = [Tensor(shape=(t,), numel=t)]
        own = temporary_bytes(self.job.optimizer, group, FLOAT_BYTES)
        moments = [
            NORM_BYTES * self.largest_shard,
            (g + (FLOAT_BYTES if g != FLOAT_BYTES else 0)) * t,
            FLOAT_BYTES * t + own,
        ]
        if self.job.precision is Precision.FP16_MIXED:
            moments.append((g + 1) * self.partition)
        return tuple({Term.OPTIMIZER_TEMPORARIES: fixed(bytes_)} for bytes_ in moments)


def _numel(tensors: Iterable[Placed]) -> int:
    return sum(tensor.numel for tensor in tensors)
