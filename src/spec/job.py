"""What is trained and how: everything that does not depend on where it runs, and one step of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from src.errors import UserError
from src.spec.choices import (
    Attention,
    Checkpointing,
    FinetuneKind,
    Loss,
    Method,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    Upcast,
)
from src.spec.hardware import Gpu
from src.spec.model import Model


def require_positive(key: str, value: int) -> None:
    """Raise UserError unless `value` is 1 or more."""
    if value < 1:
        raise UserError(key=key, value=value, allowed="a whole number, 1 or more")


_LORA_OPTIONS = ("r", "alpha", "dropout", "targets", "dora")

FINETUNE_OPTIONS: dict[FinetuneKind, tuple[str, ...]] = {
    FinetuneKind.FULL: (),
    FinetuneKind.FREEZE: ("trained_blocks",),
    FinetuneKind.LORA: _LORA_OPTIONS,
    FinetuneKind.QLORA: (*_LORA_OPTIONS, "quantization", "double_quant", "upcast"),
    FinetuneKind.PREFIX: ("num_virtual_tokens",),
    FinetuneKind.PROMPT: ("num_virtual_tokens",),
}
"""The attributes of `Finetune` that mean something, per kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finetune:
    """Which parameters are trained; `FINETUNE_OPTIONS` says what belongs to which kind.

    Attributes:
        kind: see its enum.
        trained_blocks: how many of the last blocks are trained.
        r: LoRA's rank.
        alpha: LoRA's scale; no effect on memory.
        dropout: dropout on the adapters' input, 0 to below 1.
        targets: names of the adapted Linears as PEFT's `target_modules` takes them (the last part
            of the module's name); empty: the attention projections; `("all-linear",)`: every Linear
            of the blocks.
        dora: whether magnitudes are trained beside the adapters (DoRA).
        quantization: how the frozen Linears are stored.
        double_quant: whether NF4's scales are quantised too.
        upcast: what is turned to fp32 before training.
        num_virtual_tokens: length of the trained prefix or prompt.
    """

    kind: FinetuneKind = FinetuneKind.FULL
    trained_blocks: int = 2
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    dora: bool = False
    quantization: Quantization = Quantization.NF4
    double_quant: bool = True
    upcast: Upcast = Upcast.ALL
    num_virtual_tokens: int = 20

    def __post_init__(self) -> None:
        for key in ("trained_blocks", "r", "alpha", "num_virtual_tokens"):
            require_positive(f"finetune.{key}", getattr(self, key))
        if not 0 <= self.dropout < 1:
            raise UserError(
                key="finetune.dropout", value=self.dropout, allowed="0 or more and below 1"
            )

    @property
    def trains_everything(self) -> bool:
        """Whether every parameter is trained."""
        return self.kind is FinetuneKind.FULL

    @property
    def trains_weights(self) -> bool:
        """Whether weights of the model's own are trained; else what PEFT adds is."""
        return self.kind in (FinetuneKind.FULL, FinetuneKind.FREEZE)

    @property
    def is_lora(self) -> bool:
        """Whether the model's own weights are frozen and adapters are trained."""
        return self.kind in (FinetuneKind.LORA, FinetuneKind.QLORA)

    @property
    def prompt_length(self) -> int:
        """Trained tokens in front of every sequence."""
        return self.num_virtual_tokens if self.kind is FinetuneKind.PROMPT else 0

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen Linears of the blocks are stored by bitsandbytes."""
        return self.kind is FinetuneKind.QLORA


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuffers:
    """DeepSpeed's buffer sizes, in elements; the defaults are DeepSpeed's own (docs, config-json).

    Attributes:
        reduce_bucket_size: gradients reduced at once.
        prefetch_bucket_size: parameters fetched ahead (stage 3).
        param_persistence_threshold: parameters smaller than this stay whole (stage 3).
        max_live_parameters: parameters whole at once before any is released (stage 3).
        fp32_gradients: gradients accumulate in fp32 (`data_types.grad_accum_dtype`).
    """

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    fp32_gradients: bool = False

    def __post_init__(self) -> None:
        require_positive("zero.reduce_bucket_size", self.reduce_bucket_size)
        for key in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"):
            if getattr(self, key) < 0:
                raise UserError(
                    key=f"zero.{key}", value=getattr(self, key), allowed="a whole number, 0 or more"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One fine-tuning job.

    Attributes:
        model: the model.
        finetune: which parameters are trained.
        seq_len: tokens of each sequence.
        grad_accum: micro steps per optimizer step.
        precision, optimizer, checkpointing, attention, loss, offload: see their enums.
        checkpoint_every: with full checkpointing, one block of that many is recomputed.
        activation_offload: whether tensors kept for the backward pass wait in host memory
            (`torch.autograd.graph.save_on_cpu`).
        sequence_parallel: whether what tensor parallelism leaves whole is split along the sequence.
        vocab_parallel: whether tensor parallelism splits token embedding and head along the
            vocabulary too; every GPU gets all logits.
        fp32_reduce: whether FSDP and DeepSpeed reduce half-precision gradients in fp32.
        zero: DeepSpeed's buffers; no effect on other methods.
    """

    model: Model
    finetune: Finetune = field(default_factory=Finetune)
    seq_len: int = 512
    grad_accum: int = 1
    precision: Precision = Precision.BF16_MIXED
    optimizer: Optimizer = Optimizer.ADAMW_FUSED
    checkpointing: Checkpointing = Checkpointing.FULL
    checkpoint_every: int = 1
    attention: Attention = Attention.SDPA
    loss: Loss = Loss.STANDARD
    offload: Offload = Offload.NONE
    activation_offload: bool = False
    sequence_parallel: bool = False
    vocab_parallel: bool = False
    fp32_reduce: bool = False
    zero: ZeroBuffers = field(default_factory=ZeroBuffers)

    @property
    def model_seq_len(self) -> int:
        """Tokens of each sequence as the model sees it: a trained prompt is in front of its own."""
        return self.seq_len + self.finetune.prompt_length

    def __post_init__(self) -> None:
        require_positive("seq_len", self.seq_len)
        require_positive("grad_accum", self.grad_accum)
        require_positive("checkpoint_every", self.checkpoint_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; `dp * tp` GPUs in all.

    Attributes:
        dp: data-parallel replicas, each with its own micro batch.
        tp: tensor-parallel degree.
        shard: GPUs over which sharded states are divided.
    """

    dp: int = 1
    tp: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "shard"):
            require_positive(f"layout.{key}", getattr(self, key))
        assert self.dp % self.shard == 0, "states are sharded over data-parallel ranks"

    @property
    def num_gpus(self) -> int:
        """GPUs of the layout."""
        return self.dp * self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One training step of a job by one method on one kind of GPU: what an estimator estimates.

    Attributes:
        job: the job.
        method: how it is spread.
        layout: the degrees of that method.
        gpu: the GPU model.
        micro_batch: sequences per GPU per forward pass.
    """

    job: Job
    method: Method
    layout: Layout
    gpu: Gpu
    micro_batch: int

    def __post_init__(self) -> None:
        require_positive("micro_batch", self.micro_batch)
