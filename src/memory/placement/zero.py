"""DeepSpeed's ZeRO stages 1 and 2: whole weights, a flat fp32 partition of 1/N, one reduce bucket.

Source: `deepspeed/runtime/zero/stage_1_and_2.py`, release 0.19.8, and runs of it.
Letters: T trained elements, N ranks, t = T / N of a rank's run, w elements of the tensors that
reach into it, p bytes of a weight, g of an accumulated gradient, c of a reduced one, b elements of
the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from src.memory.counts import Counts, Tensor
from src.memory.optimizers import state_bytes, temporary_bytes
from src.memory.placement.partitions import (
    ALIGNMENT,
    EMBEDDINGS,
    Reduction,
    Share,
    pinned_bytes,
    placed_tensors,
    reductions,
    rounded_up,
    shares,
)
from src.memory.placement.whole import Placement
from src.memory.size import FLOAT_BYTES, Size, fixed
from src.memory.terms import Term
from src.memory.values import Terms, merged
from src.spec import Method, Offload, Precision

NORM_BYTES = 8
"""Gradient norms are taken of fp64 copies (`get_norm_dtype`)."""


@dataclass(frozen=True, kw_only=True)
class ZeroPlacement(Placement):
    """What all stages have in common, and stages 1 and 2.

    Weights are in half precision (fp32 with `precision=fp32`), the optimizer works on a flat fp32
    partition.
    """

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return {Method.ZERO1: 1, Method.ZERO2: 2, Method.ZERO3: 3}[self.method]

    @property
    def model_bytes(self) -> int:
        """Bytes p per element of the engine's weights and gradients."""
        return 4 if self.job.precision is Precision.FP32 else 2

    @property
    def accumulated_bytes(self) -> int:
        """Bytes g (`data_types.grad_accum_dtype`)."""
        return FLOAT_BYTES if self.job.zero.fp32_gradients else self.model_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes c (`communication_data_type`)."""
        return FLOAT_BYTES if self.job.fp32_reduce else self.model_bytes

    @property
    def offloads(self) -> bool:
        """Whether optimizer states, and so the fp32 partition, are in host memory."""
        return self.job.offload is not Offload.NONE

    @property
    def is_compact(self) -> bool:
        """Whether reduced gradients go straight into a flat fp32 partition."""
        return self.accumulated_bytes != self.model_bytes

    @property
    def gradient_term(self) -> Term:
        """Stage 1 keeps whole gradients; later stages do not."""
        return Term.GRADIENTS if self.stage == 1 else Term.UNSHARDED_GRADIENTS

    @cached_property
    def trained(self) -> int:
        """Elements T."""
        return round(self.counts.all.trained)

    @cached_property
    def partition(self) -> int:
        """Elements t, padded."""
        shard = self.layout.shard
        return rounded_up(self.trained, ALIGNMENT * shard) // shard

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Every rank's run."""
        return shares(self.decoder, self.job.finetune, self.layout.shard)

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """Every emptying of the bucket; in stage 1 after the backward pass, in model order."""
        return reductions(
            self.decoder,
            self.job.finetune,
            self.layout.shard,
            self.job.zero.reduce_bucket_size,
            backward=self.stage > 1,
        )

    @cached_property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        tensors = placed_tensors(self.decoder, self.job.finetune)
        return max(tensor.numel for tensor in tensors if tensor.trained)

    def weights(self) -> float:
        """`p * P`: adapters are cast with everything else; quantised weights stay as they are."""
        part, bytes_ = self.counts.all, self.model_bytes
        whole = part.bytes_of(dense=bytes_, norm=bytes_, adapter=bytes_)
        return whole + part.statistics_bytes

    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The flat fp32 partition is one tensor."""
        return (Tensor(shape=(self.partition,), numel=self.partition),)

    def optimizer_states(self) -> float:
        """States of the fp32 partition."""
        return state_bytes(self.job.optimizer, self.kept_tensors(), FLOAT_BYTES)

    def static(self) -> Terms:
        """Weights, fp32 partition, states; offloaded: weights, a buffer of the largest tensor."""
        weights = {Term.WEIGHTS: fixed(self.weights())}
        if self.offloads:
            buffer = self.largest * self.model_bytes
            return {**weights, Term.COMMUNICATION_BUFFERS: fixed(buffer)}
        return {
            **weights,
            Term.MASTER_WEIGHTS: fixed(self.partition * FLOAT_BYTES),
            Term.OPTIMIZER_STATES: fixed(self.optimizer_states()),
        }

    def host(self) -> Size:
        """Page-locked: fp32 partition and gradient, weights on their way back, one tensor's buffer.

        Stage 2 keeps between micro steps also the gradients of the tensors that reach into the
        partition. The states are pageable.
        """
        p, t = self.model_bytes, self.partition
        if not self.offloads:
            return fixed(0)
        pinned = [FLOAT_BYTES * t, FLOAT_BYTES * t, p * t, p * self.largest]
        total = sum(map(pinned_bytes, pinned)) + self.optimizer_states()
        if self.stage == 2 and self.job.grad_accum > 1 and not self.is_compact:
            total += max(
                sum(pinned_bytes(p * numel) for numel in share.sizes) for share in self.shares
            )
        return fixed(total)

    def load(self) -> Terms:
        """Weights, and the fp32 partition where it stays on the GPU."""
        terms = self.static()
        return {key: terms[key] for key in (Term.WEIGHTS, Term.MASTER_WEIGHTS) if key in terms}

    @property
    def waiting_bytes(self) -> int:
        """Per element of a whole gradient that stage 1 keeps."""
        return self.accumulated_bytes

    def forward_buffers(self) -> Terms:
        """Stage 1 gives its bucket back when it reduces: after the last micro step."""
        leaves = self.stage == 1 and self.job.grad_accum > 1
        return self.backward_buffers() if leaves else {}

    def backward_buffers(self) -> Terms:
        """The bucket, allocated whole, however small the model: `p b`, in stage 1 `g b`."""
        bytes_ = self.job.zero.reduce_bucket_size * self._own_bytes
        return {Term.COMMUNICATION_BUFFERS: fixed(bytes_)}

    def kept_gradients(self, part: Counts) -> float:
        """Stage 1: `g` per element. Stage 2: see `reduced_gradients`."""
        return part.trained * self.waiting_bytes if self.stage == 1 else 0.0

    def reduced_gradients(self, index: int) -> float:
        """Stage 2: what this rank keeps of gradients reduced before block `index` is at work."""
        if self.stage == 1:
            return 0.0
        return self._reduced(sum(one.elements for one in self.reductions if one.block > index))

    def _reduced(self, elements: int) -> float:
        """What the fullest rank keeps once so many gradients have been reduced, last ones first."""
        waits = self.is_compact and self.keeps_gradients_between_steps
        if waits or not elements:
            return 0.0
        return self._owned(self.shares[(self.trained - elements) // self.partition :])

    def _owned(self, shares: Sequence[Share]) -> float:
        """`p w`: every tensor that reaches into the run, whole; compact: `4 t`; offloaded: none."""
        if self.is_compact:
            return float(FLOAT_BYTES * self.partition)
        if self.offloads:
            return 0.0
        return float(self.model_bytes * max(share.whole for share in shares))

    @cached_property
    def owned_gradients(self) -> float:
        """The fullest rank's, once all are reduced."""
        return self._owned(self.shares)

    def waiting_gradients(self) -> Terms:
        """Stage 1: whole ones; stage 2: this rank's."""
        whole = self.trained * self.waiting_bytes
        return {Term.GRADIENTS: fixed(whole if self.stage == 1 else self.owned_gradients)}

    def edge_gradients(self, numel: float) -> Terms:
        """Whole: kept in stage 1; else a tied weight's, which waits for the embedding's."""
        if self.stage == 1:
            return {Term.GRADIENTS: fixed(numel * self.waiting_bytes)}
        return {Term.UNSHARDED_GRADIENTS: fixed(numel * self.model_bytes)}

    def head_gradient(self) -> float:
        """The head's gradient when the bucket is allocated for it."""
        head = self.decoder.head.num_parameters if self.regime.trains_weights else 0
        return head * self.model_bytes

    def table_gradient(self) -> float:
        """The token embedding's, whole."""
        if self.regime.tied or not self.regime.trains_weights:
            return 0.0
        table = self.decoder.token_embedding
        return table.rows * table.width * self.model_bytes

    @property
    def reducing_blocks(self) -> frozenset[int]:
        """Blocks during whose backward pass the bucket is emptied first, second and last."""
        found = [one.block for one in self.reductions[:-1] if one.block != EMBEDDINGS]
        return frozenset(found[:2] + found[-1:]) if self.stage > 1 else frozenset()

    def reducing(self, index: int) -> Terms:
        """What emptying the bucket takes while block `index` is at work."""
        within = [one for one in self.reductions[:-1] if one.block == index]
        if not within or self.stage == 1:
            return {}
        bytes_ = max(self.reduction_bytes(one) for one in within)
        return {Term.COMMUNICATION_BUFFERS: fixed(bytes_)}

    def reduction_bytes(self, one: Reduction) -> float:
        """A copy of the bucket unless it is one rank's, and one in another dtype to reduce.

        A tensor larger than the bucket keeps its own gradient meanwhile.
        """
        held = self._own_bytes
        split = one.owners > 1 or (self.is_compact and one.tensors > 1)
        copies = held * split + (self.reduced_bytes if self.reduced_bytes != held else 0)
        return one.elements * (copies + (held if self._is_oversized(one) else 0))

    @property
    def _own_bytes(self) -> int:
        """Per element of a gradient on its way to be reduced."""
        return self.waiting_bytes if self.stage == 1 else self.model_bytes

    def _is_oversized(self, one: Reduction) -> bool:
        """Whether it is a tensor that does not fit into the bucket."""
        return one.elements > self.job.zero.reduce_bucket_size

    @property
    def added_bytes(self) -> int:
        """Compact: a piece of the run in fp32 before it is added to it."""
        if not self.is_compact or self.reduced_bytes == FLOAT_BYTES:
            return 0
        return FLOAT_BYTES * max(share.largest for share in self.shares)

    def sync(self) -> tuple[Terms, ...]:
        """The last emptying (stage 1: every one), then what this rank keeps."""
        if self.stage == 1:
            return self._sync_whole()
        waiting = self.waiting_gradients() if self.keeps_gradients_between_steps else {}
        last = self.reductions[-1]
        kept = self._reduced(last.after)
        if self.is_compact:
            kept, waiting = self.owned_gradients, {}
        during = {
            Term.GRADIENTS: fixed(kept),
            Term.COMMUNICATION_BUFFERS: fixed(self.reduction_bytes(last) + self.added_bytes),
        }
        return merged(waiting, during), merged(waiting, self._moved(last))

    def _moved(self, one: Reduction) -> Terms:
        """Gradients of the run copied out of the bucket; offloaded: one in fp64 for its norm."""
        own = self._own_bytes * one.elements if self._is_oversized(one) else 0
        terms = {Term.GRADIENTS: fixed(self.owned_gradients + own)}
        if self.offloads:
            norm = NORM_BYTES * max(share.largest for share in self.shares)
            terms[Term.OPTIMIZER_TEMPORARIES] = fixed(norm)
        return terms

    def _sync_whole(self) -> tuple[Terms, ...]:
        """Gradients move into the bucket one by one, so a copy takes the place of those in it."""
        kept = self.owned_gradients if self.is_compact else 0.0
        found = [{Term.GRADIENTS: fixed(self.trained * self.waiting_bytes)}]
        for one in self.reductions:
            left = (self.trained - one.after - one.elements) * self.waiting_bytes
            during = {
                Term.GRADIENTS: fixed(left + kept),
                Term.COMMUNICATION_BUFFERS: fixed(self.reduction_bytes(one) + self.added_bytes),
            }
            kept = self.owned_gradients
            found += [during, merged({Term.GRADIENTS: fixed(left)}, self._moved(one))]
        return (max(found, key=lambda terms: sum(size.fixed for size in terms.values())),)

    @property
    def keeps_gradients_between_steps(self) -> bool:
        """When micro steps accumulate; stage 2's offloaded gradients wait in host memory."""
        on_host = self.stage == 2 and self.offloads and not self.is_compact
        return self.job.grad_accum > 1 and not on_host

    def steps(self) -> tuple[Terms, ...]:
        """The norm; the run's gradients joined and in fp32 beside their sources; the optimizer.

        The sources are one buffer for all parameter groups, which goes with the last one: beside
        the Trainer's matrices, with weight decay, its vectors keep it.
        """
        kept = {Term.GRADIENTS: fixed(self.owned_gradients)}
        if self.offloads:
            return (kept,)
        most = max(self.shares, key=lambda one: self._owned([one]) + NORM_BYTES * one.largest)
        norm = {
            Term.GRADIENTS: fixed(self._owned([most])),
            Term.OPTIMIZER_TEMPORARIES: fixed(NORM_BYTES * most.largest),
        }
        fp32 = FLOAT_BYTES * self.partition
        own = temporary_bytes(self.job.optimizer, self.kept_tensors(), FLOAT_BYTES)
        step = {Term.OPTIMIZER_TEMPORARIES: fixed(fp32 + own)}
        if self.is_compact:
            return norm, step
        if self.regime.trains_weights:
            step = {**kept, **step}
        joined = fp32
        if self.model_bytes != FLOAT_BYTES and any(len(share.sizes) > 1 for share in self.shares):
            joined += self.model_bytes * self.partition
        return norm, {**kept, Term.OPTIMIZER_TEMPORARIES: fixed(joined)}, step
