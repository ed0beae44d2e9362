"""DeepSpeed's ZeRO: a flat fp32 partition of 1/N, gradients through buckets."""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.counts import Counts, Tensor
from src.memory.optimizers import state_bytes, temporary_bytes
from src.memory.placement.whole import Placement
from src.memory.size import FLOAT_BYTES, ZERO, Size, fixed
from src.memory.tape import Terms
from src.memory.terms import Term
from src.spec import Method, Precision

SUB_GROUP = 1e9
"""Elements that stage 3 steps at once (`sub_group_size`)."""


@dataclass(frozen=True, kw_only=True)
class ZeroPlacement(Placement):
    """DeepSpeed ZeRO stage 1, 2 or 3 (`deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py`).

    Weights are in half precision (fp32 with `precision=fp32`), the optimizer works on a flat fp32
    partition of 1/N; gradients are reduced through a bucket of `zero.reduce_bucket_size` elements.
    """

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return {Method.ZERO1: 1, Method.ZERO2: 2, Method.ZERO3: 3}[self.method]

    @property
    def model_bytes(self) -> int:
        """Bytes per element of the engine's weights and gradients."""
        return 4 if self.job.precision is Precision.FP32 else 2

    @property
    def gradient_term(self) -> Term:
        """Stage 1 keeps whole gradients; later stages do not."""
        return Term.GRADIENTS if self.stage == 1 else Term.UNSHARDED_GRADIENTS

    def _partition(self) -> float:
        """Trained elements of one rank's flat partition."""
        return self.counts.all.trained / self.layout.shard

    def weights(self) -> float:
        """Whole in stages 1 and 2, 1/N in stage 3 with small tensors whole."""
        everything = self.counts.all.base + self.counts.all.adapters
        if self.stage < 3:
            return everything * self.model_bytes
        persistent = self.counts.all.small
        shard = (everything - persistent) / self.layout.shard
        return (shard + persistent) * self.model_bytes

    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The flat fp32 partition is one tensor."""
        numel = self._partition()
        return (Tensor(shape=(round(numel),), numel=numel),)

    def optimizer_states(self) -> float:
        """States of the fp32 partition."""
        return state_bytes(self.job.optimizer, self.kept_tensors(), FLOAT_BYTES)

    def static(self) -> Terms:
        """Weights, fp32 partition, states; stage 3 also its flat gradients and reduce bucket."""
        terms = {
            Term.WEIGHTS: fixed(self.weights()),
            Term.MASTER_WEIGHTS: fixed(self._partition() * FLOAT_BYTES),
            Term.OPTIMIZER_STATES: fixed(self.optimizer_states()),
        }
        if self.stage == 3:
            terms[Term.GRADIENTS] = fixed(self._partition() * self.model_bytes)
            terms[Term.COMMUNICATION_BUFFERS] = fixed(self._bucket())
        return terms

    def load(self) -> Terms:
        """Weights and their fp32 partition."""
        return {
            Term.WEIGHTS: fixed(self.weights()),
            Term.MASTER_WEIGHTS: fixed(self._partition() * FLOAT_BYTES),
        }

    def _bucket(self) -> float:
        """The reduce bucket; it is allocated whole, however small the model."""
        return self.job.zero.reduce_bucket_size * self.model_bytes

    def backward_buffers(self) -> Terms:
        """Stages 1 and 2 allocate their bucket for the backward pass."""
        if self.stage == 3:
            return {}
        return {Term.COMMUNICATION_BUFFERS: fixed(self._bucket())}

    def kept_gradients(self, part: Counts) -> float:
        """Stage 1: whole; stage 2: 1/N of the averaged gradient; stage 3: in its static buffer."""
        if self.stage == 3:
            return 0.0
        return part.trained * self.model_bytes / (1 if self.stage == 1 else self.layout.shard)

    def edge_gradients(self, numel: float) -> Terms:
        """As any other part's."""
        divisor = {1: 1, 2: self.layout.shard, 3: 0}[self.stage]
        kept = numel * self.model_bytes / divisor if divisor else 0.0
        return {Term.GRADIENTS: fixed(kept)}

    def _live(self) -> Size:
        """Stage 3: whole weights kept for reuse: up to `max_live_parameters`, two blocks at least.

        A released parameter that comes again within `stage3_max_reuse_distance` (1e9) is not
        released, so a small model stays whole.
        """
        if self.stage < 3:
            return ZERO
        everything = self.counts.all.base + self.counts.all.adapters - self.counts.all.small
        block = self.counts.largest_block
        least = 2 * (block.base + block.adapters) + self.counts.edges.largest
        ahead = self.job.zero.max_live_parameters + self.job.zero.prefetch_bucket_size
        return fixed(min(everything, max(least, ahead)) * self.model_bytes)

    def gathered_forward(self) -> Size:
        """See `_live`."""
        return self._live()

    def gathered_backward(self, index: int) -> Size:
        """See `_live`."""
        del index
        return self._live()

    def gathered_edges(self) -> Size:
        """See `_live`."""
        return self._live()

    @property
    def keeps_gradients_between_steps(self) -> bool:
        """Stage 3's gradients are in its static buffer."""
        return self.job.grad_accum > 1 and self.stage < 3

    def gradients_at_step(self) -> float:
        """Only the partition's gradient is left in stages 1 and 2."""
        return 0.0 if self.stage == 3 else self._partition() * self.model_bytes

    def step(self) -> Terms:
        """The partition's gradient in fp32 (stage 3: per 1e9 elements); the optimizer's own."""
        elements = self._partition() if self.stage < 3 else min(self._partition(), SUB_GROUP)
        group = [Tensor(shape=(round(elements),), numel=elements)]
        own = temporary_bytes(self.job.optimizer, group, FLOAT_BYTES)
        return {Term.OPTIMIZER_TEMPORARIES: fixed(elements * FLOAT_BYTES + own)}
