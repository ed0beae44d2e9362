"""Where weights, gradients and optimizer states lie, per method, and which buffers that needs.

Letters: P parameters on this GPU, Pt trained ones, N GPUs of the shard group.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.counts import Counts, ModelCounts
from src.memory.regime import Regime
from src.memory.size import FLOAT_BYTES, ZERO, Size, fixed
from src.memory.tape import Terms
from src.memory.terms import Term
from src.spec import Job, Layout, Method, Optimizer, Precision


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One GPU's share of the training state; the plain case: everything whole (`single`, `tp`).

    Attributes:
        job, method, layout, regime, counts: what it follows from.
    """

    job: Job
    method: Method
    layout: Layout
    regime: Regime
    counts: ModelCounts

    @property
    def trained_bytes(self) -> int:
        """Bytes per element of stored trained parameters; LoRA's adapters are fp32 (PEFT)."""
        if self.regime.finetune.is_lora:
            return FLOAT_BYTES
        return self.job.precision.weight_bytes

    @property
    def gradient_term(self) -> Term:
        """Whether a block's fresh gradients are already those that this GPU keeps."""
        return Term.GRADIENTS

    def weights(self) -> float:
        """`P * stored bytes`, adapters at theirs."""
        base = self.counts.all.base * self.job.precision.weight_bytes
        return base + self.counts.all.adapters * FLOAT_BYTES

    def optimizer_states(self) -> float:
        """`Pt * stored bytes * states per parameter` (torch.optim keeps the parameter's dtype)."""
        states = self.job.optimizer.states_per_parameter
        return self.counts.all.trained * self.trained_bytes * states

    def static(self) -> Terms:
        """Alive at every instant of the step."""
        terms = {
            Term.WEIGHTS: fixed(self.weights()),
            Term.OPTIMIZER_STATES: fixed(self.optimizer_states()),
        }
        if self.method.has_ddp:
            terms[Term.COMMUNICATION_BUFFERS] = fixed(self.ddp_buckets())
        return terms

    def ddp_buckets(self) -> float:
        """One gradient-sized buffer in all (`gradient_as_bucket_view` is off by default)."""
        return self.counts.all.trained * self.trained_bytes

    def load(self) -> Terms:
        """The weights as they arrive, before the wrapper and the optimizer exist."""
        return {Term.WEIGHTS: fixed(self.weights())}

    def backward_buffers(self) -> Terms:
        """Buffers that live as long as the backward pass."""
        return {}

    def kept_gradients(self, part: Counts) -> float:
        """What stays of a part's gradients once its backward pass is over."""
        return part.trained * self.trained_bytes

    def waiting_gradients(self) -> Terms:
        """Gradients of earlier micro steps, where they accumulate."""
        return {Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all))}

    def edge_gradients(self, numel: float) -> Terms:
        """Gradients of head and final norm (`numel` trained elements) while blocks run backward."""
        return {Term.GRADIENTS: fixed(numel * self.trained_bytes)}

    def gathered_ahead(self) -> Size:
        """Whole weights alive while the first ones are gathered for the forward pass."""
        return ZERO

    def gathered_last(self) -> Size:
        """Whole weights alive while the last block's are gathered for the forward pass."""
        return ZERO

    def gathered_forward(self) -> Size:
        """Whole weights alive at the end of the forward pass, where they are sharded."""
        return ZERO

    def gathered_loss(self) -> Size:
        """Whole weights alive when the backward pass begins."""
        return self.gathered_forward()

    def gathered_backward(self, index: int) -> Size:
        """Whole weights alive while block `index` runs backward."""
        del index
        return ZERO

    def gathered_edges(self) -> Size:
        """Whole weights alive when the embeddings' gradients arrive."""
        return ZERO

    def neighbour_buffers(self, index: int) -> Terms:
        """Communication buffers that block `index` leaves behind when the backward pass goes on."""
        del index
        return {}

    def sync(self) -> tuple[Terms, ...]:
        """Gradients and buffers while the last gradients are reduced; alternatives."""
        return ({Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all))},)

    def step(self) -> Terms:
        """The optimizer's own temporaries.

        foreach AdamW takes the square root of all second moments at once: one full-size copy
        (`torch/optim/adamw.py`, `_multi_tensor_adamw`); the fused kernel and SGD need none.
        """
        if self.job.optimizer is not Optimizer.ADAMW:
            return {}
        return {Term.OPTIMIZER_TEMPORARIES: fixed(self.counts.all.trained * self.trained_bytes)}

    def gradients_at_step(self) -> float:
        """Gradients alive while the optimizer runs."""
        return self.kept_gradients(self.counts.all)

    @property
    def keeps_gradients_between_steps(self) -> bool:
        """Whether gradients are alive in the forward pass: when micro steps accumulate."""
        return self.job.grad_accum > 1


@dataclass(frozen=True, kw_only=True)
class FsdpPlacement(Placement):
    """`fully_shard` on each block and the root (PyTorch FSDP2), as accelerate sets it up.

    Parameters, gradients and states are split along each tensor's first dimension. Whole weights of
    a block are gathered for its forward and backward pass, the next block's ahead of it; the root
    (embeddings, norm, head) stays whole from its forward to the end of the backward pass.
    """

    @property
    def gradient_term(self) -> Term:
        """A block's fresh gradients are whole."""
        return Term.UNSHARDED_GRADIENTS

    def _whole(self, part: Counts) -> float:
        """A part gathered in the dtype that computes."""
        return part.base * self.regime.parameter_bytes + part.adapters * self.regime.adapter_bytes

    def _whole_gradients(self, part: Counts) -> float:
        base = part.base * self.regime.gradient_bytes if part.trains_base else 0
        return base + part.adapters * self.regime.adapter_bytes

    def weights(self) -> float:
        """The fullest rank's shards, at the stored dtype."""
        base = self.counts.all.base_shard * self.job.precision.weight_bytes
        return base + self.counts.all.adapters_shard * FLOAT_BYTES

    def optimizer_states(self) -> float:
        """States of the shards."""
        states = self.job.optimizer.states_per_parameter
        return self.counts.all.trained_shard * self.trained_bytes * states

    def kept_gradients(self, part: Counts) -> float:
        """The shard of the reduced gradient, at the stored dtype."""
        return part.trained_shard * self.trained_bytes

    def waiting_gradients(self) -> Terms:
        """Whole: accelerate switches reducing off between micro steps (`no_sync`)."""
        return {Term.UNSHARDED_GRADIENTS: fixed(self._whole_gradients(self.counts.all))}

    def edge_gradients(self, numel: float) -> Terms:
        """Whole until the root reduces them after everything else."""
        return {Term.UNSHARDED_GRADIENTS: fixed(numel * self.regime.gradient_bytes)}

    def gathered_ahead(self) -> Size:
        """Root and first block, each whole and in the buffer that its all-gather filled."""
        return fixed(2 * (self._whole(self.counts.edges) + self._whole(self.counts.blocks[0])))

    def gathered_last(self) -> Size:
        """The root (or everything), the last block, its buffer, and the buffer of the one before.

        A buffer is held until the next all-gather has been copied out of its own.
        """
        buffers = sum(self._whole(part) for part in self.counts.blocks[-2:])
        if self.method is Method.FSDP_GRAD:
            return fixed(self._whole(self.counts.all) + buffers)
        last = self._whole(self.counts.blocks[-1])
        return fixed(self._whole(self.counts.edges) + last + buffers)

    def gathered_forward(self) -> Size:
        """The root (or everything), and the last all-gather's buffer, held until the next one."""
        held = self._whole(self.counts.blocks[-1])
        return fixed(self._whole(self._unfreed()) + held)

    def gathered_loss(self) -> Size:
        """The same; where nothing is gathered again, the held buffer is gone."""
        if self.method is Method.FSDP_GRAD:
            return fixed(self._whole(self.counts.all))
        return self.gathered_forward()

    def _unfreed(self) -> Counts:
        return self.counts.all if self.method is Method.FSDP_GRAD else self.counts.edges

    def gathered_backward(self, index: int) -> Size:
        """The root, the block at work, and the all-gather buffer of the one that comes next.

        Without resharding after the forward pass, every block up to the one at work.
        """
        blocks = self.counts.blocks
        first = 0 if self.method is Method.FSDP_GRAD else max(index - 1, 0)
        whole = sum(self._whole(part) for part in blocks[first : index + 1])
        return fixed(self._whole(self.counts.edges) + whole)

    def gathered_edges(self) -> Size:
        """The root."""
        return fixed(self._whole(self.counts.edges))

    def neighbour_buffers(self, index: int) -> Terms:
        """A block's reduce-scatter input is held until the next one's turn comes."""
        held = self._whole_gradients(self.counts.blocks[index])
        return {Term.COMMUNICATION_BUFFERS: fixed(held)}

    def sync(self) -> tuple[Terms, ...]:
        """The root's whole gradients and their copy that the reduce-scatter reads; its output then.

        The output arrives in the dtype of the reduction and is cast to the stored one. The root's
        weights have been freed by then.
        """
        edges = self.counts.edges
        whole = self._whole_gradients(edges)
        reduced = edges.trained_shard * self.regime.gradient_bytes
        blocks = fixed(self.kept_gradients(self.counts.blocks_together))
        return (
            {
                Term.GRADIENTS: blocks,
                Term.UNSHARDED_GRADIENTS: fixed(whole),
                Term.COMMUNICATION_BUFFERS: fixed(whole),
            },
            {
                Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all)),
                Term.COMMUNICATION_BUFFERS: fixed(whole + reduced),
            },
        )

    def step(self) -> Terms:
        """Foreach AdamW's copy is as large as the shard."""
        if self.job.optimizer is not Optimizer.ADAMW:
            return {}
        copy = self.counts.all.trained_shard * self.trained_bytes
        return {Term.OPTIMIZER_TEMPORARIES: fixed(copy)}


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

    def optimizer_states(self) -> float:
        """States of the fp32 partition."""
        return self._partition() * FLOAT_BYTES * self.job.optimizer.states_per_parameter

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
        """The partition's gradient in fp32 (stage 3: per 1e9 elements); foreach's copy."""
        elements = self._partition() if self.stage < 3 else min(self._partition(), 1e9)
        copies = 2 if self.job.optimizer is Optimizer.ADAMW else 1
        return {Term.OPTIMIZER_TEMPORARIES: fixed(elements * FLOAT_BYTES * copies)}


def place(
    job: Job, method: Method, layout: Layout, regime: Regime, counts: ModelCounts
) -> Placement:
    """The placement of a method."""
    kind = Placement
    if method.is_zero:
        kind = ZeroPlacement
    elif method.is_fsdp:
        kind = FsdpPlacement
    return kind(job=job, method=method, layout=layout, regime=regime, counts=counts)
