"""Dtypes and switches that a job and a method imply for every operation of the model."""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture import Decoder
from src.memory.kernels import Kernel, choose_kernel
from src.memory.size import FLOAT_BYTES
from src.spec import Checkpointing, Finetune, Gpu, Job, Layout, Loss, Method, Precision, Upcast

_BUCKETED_GRADIENTS = (Method.ZERO2, Method.ZERO3)
"""DeepSpeed moves each gradient to its bucket as soon as it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """How one GPU computes.

    Attributes:
        parameter_bytes: per element of the weights that the forward pass reads.
        norm_bytes: the same of norms.
        compute_bytes: per element of a matrix multiply's operands.
        block_out_bytes: per element that a block's output is cast to; None: as it comes.
        autocast: whether autocast wraps the forward pass.
        gradient_bytes: per element of a weight's gradient as autograd leaves it.
        kernel: the attention kernel.
        finetune: which weights are trained.
        trains_weights: whether the own weights of the part at hand are trained.
        adapter_bytes: per element of LoRA's adapters.
        head: name of the Linear that makes the logits.
        tp: tensor-parallel degree.
        splits_sequence: whether what tensor parallelism leaves whole holds 1/tp of the sequence.
        accumulates: whether a gradient does not stay: those of earlier micro steps are there to be
            added to, or a bucket to be moved to.
        tied: whether the head's gradient is added to the token embedding's.
        keeps_operands: whether every Linear keeps its input and weight, frozen or not, and makes
            its weight's gradient as a plain tensor (DeepSpeed's `LinearFunctionForZeroStage3`).
        masked: whether attention is given a mask, and so cannot rely on `is_causal`.
        checkpointing: what is kept for the backward pass.
        checkpoint_every: with full checkpointing, one block of that many is recomputed.
        offloads: whether tensors kept for the backward pass wait in host memory.
        loss: how head and loss are computed.
    """

    parameter_bytes: int
    norm_bytes: int
    compute_bytes: int
    block_out_bytes: int | None
    autocast: bool
    gradient_bytes: int
    kernel: Kernel
    finetune: Finetune
    trains_weights: bool
    adapter_bytes: int
    head: str
    tp: int
    splits_sequence: bool
    accumulates: bool
    tied: bool
    keeps_operands: bool
    masked: bool
    checkpointing: Checkpointing
    checkpoint_every: int
    offloads: bool
    loss: Loss

    @property
    def logits_bytes(self) -> int:
        """Bytes per element of the logits: outside autocast they come in the weights' dtype."""
        return self.compute_bytes if self.autocast else self.parameter_bytes

    @property
    def stream_share(self) -> float:
        """The part of the residual stream between the Linears that this GPU holds."""
        return 1 / self.tp if self.splits_sequence else 1.0

    @property
    def casts_weights(self) -> bool:
        """Whether autocast makes half-precision copies of the weights."""
        return self.autocast and self.parameter_bytes != self.compute_bytes

    @property
    def recomputes_attention(self) -> bool:
        """Whether the attention module of each block is recomputed, and nothing else."""
        return self.checkpointing is Checkpointing.SELECTIVE

    @property
    def whole_logits(self) -> bool:
        """Whether the head runs once, over all tokens, and gives the loss logits."""
        return self.loss in (Loss.STANDARD, Loss.STANDARD_4X)

    @property
    def embedding_is_leaf(self) -> bool:
        """Whether frozen embeddings' output is made to require a gradient.

        So it is under checkpointing (`enable_input_require_grads`, which transformers 5 calls
        itself): gradients flow through every frozen block, down to the first.
        """
        checkpointed = self.checkpointing is Checkpointing.FULL
        return checkpointed and not self.finetune.trains_everything


def stored_bytes(job: Job) -> tuple[int, int]:
    """Bytes per element of stored weights that are not quantised, and of norms, outside DeepSpeed.

    A model to quantise is loaded in the dtype that computes; `upcast` turns it to fp32 afterwards.
    """
    if not job.finetune.is_quantized:
        return job.precision.weight_bytes, job.precision.weight_bytes
    loaded = job.precision.compute_bytes
    upcast = job.finetune.upcast
    return (
        FLOAT_BYTES if upcast is Upcast.ALL else loaded,
        loaded if upcast is Upcast.NONE else FLOAT_BYTES,
    )


def regime_of(
    decoder: Decoder, job: Job, method: Method, layout: Layout, gpu: Gpu, *, masked: bool = False
) -> Regime:
    """The regime of a job under a method, for blocks whose attention is given a mask or not.

    `*-mixed` is what Hugging Face's Trainer and accelerate do: fp32 weights under autocast on one
    GPU, with DDP and with tensor parallelism; half-precision unsharded weights, block outputs and
    reductions under autocast with FSDP (its `MixedPrecisionPolicy`); half-precision weights without
    autocast in DeepSpeed, whose fp32 master copy is a term of its own.
    """
    precision = job.precision
    parameter_bytes, norm_bytes = stored_bytes(job)
    if precision.is_mixed and (method.is_zero or method.is_fsdp):
        parameter_bytes = norm_bytes = 2
    adapters = adapter_bytes(precision, method)
    gradient = adapters if not job.finetune.trains_weights else parameter_bytes
    # FSDP then keeps those of earlier micro steps in fp32, beside autograd's own.
    apart = method.is_fsdp and job.fp32_reduce and gradient != FLOAT_BYTES
    return Regime(
        parameter_bytes=parameter_bytes,
        norm_bytes=norm_bytes,
        compute_bytes=precision.compute_bytes,
        block_out_bytes=2 if precision.is_mixed and method.is_fsdp else None,
        autocast=precision.is_mixed and not method.is_zero,
        gradient_bytes=parameter_bytes,
        kernel=choose_kernel(decoder, job, gpu, masked=masked),
        finetune=job.finetune,
        trains_weights=job.finetune.trains_everything,
        adapter_bytes=adapters,
        head=decoder.lm_head.name,
        tp=layout.tp,
        splits_sequence=job.sequence_parallel and layout.tp > 1,
        accumulates=method in _BUCKETED_GRADIENTS or (job.grad_accum > 1 and not apart),
        tied=decoder.lm_head.tied,
        keeps_operands=method is Method.ZERO3,
        masked=masked,
        checkpointing=job.checkpointing,
        checkpoint_every=job.checkpoint_every,
        offloads=job.activation_offload,
        loss=job.loss,
    )


def adapter_bytes(precision: Precision, method: Method) -> int:
    """Bytes per element of LoRA's adapters in the forward pass.

    PEFT makes them fp32 whatever the base model's dtype (`autocast_adapter_dtype`); DeepSpeed's
    engine then casts them with everything else, and FSDP's mixed precision gathers them in half
    precision.
    """
    return 2 if precision.is_mixed and (method.is_zero or method.is_fsdp) else 4
