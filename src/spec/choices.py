"""The closed sets a job is chosen from. Values are what the user types; names follow the field."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from src.errors import unknown_name


class Method(StrEnum):
    """How the job is spread over the GPUs."""

    SINGLE = "single"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    FSDP_GRAD = "fsdp-grad"
    TP = "tp"
    DDP_TP = "ddp+tp"
    FSDP_TP = "fsdp+tp"

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed's engine runs the step."""
        return self in (Method.ZERO1, Method.ZERO2, Method.ZERO3)

    @property
    def is_fsdp(self) -> bool:
        """Whether PyTorch's `fully_shard` shards the parameters."""
        return self in (Method.FSDP, Method.FSDP_GRAD, Method.FSDP_TP)

    @property
    def has_tensor_parallel(self) -> bool:
        """Whether every Linear of a block is split over a tensor-parallel group."""
        return self in (Method.TP, Method.DDP_TP, Method.FSDP_TP)

    @property
    def has_ddp(self) -> bool:
        """Whether `DistributedDataParallel` averages the gradients."""
        return self in (Method.DDP, Method.DDP_TP)


class FinetuneKind(StrEnum):
    """Which parameters are trained."""

    FULL = "full"
    LORA = "lora"


class Precision(StrEnum):
    """Dtype of weights and of the computation.

    `*-mixed` keeps fp32 weights and computes under autocast (DeepSpeed: half-precision weights
    with an fp32 master copy); `bf16-true` keeps and computes everything in bf16.
    """

    BF16_MIXED = "bf16-mixed"
    BF16_TRUE = "bf16-true"
    FP16_MIXED = "fp16-mixed"
    FP32 = "fp32"

    @property
    def is_mixed(self) -> bool:
        """Whether weights are fp32 and the computation is half precision."""
        return self in (Precision.BF16_MIXED, Precision.FP16_MIXED)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of a matrix multiply's operands."""
        return 4 if self is Precision.FP32 else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the stored weights, outside DeepSpeed."""
        return 2 if self is Precision.BF16_TRUE else 4


class Optimizer(StrEnum):
    """`adamw` and `sgd*` are PyTorch's foreach implementations, `adamw-fused` the fused kernel."""

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"

    @property
    def states_per_parameter(self) -> int:
        """State tensors with the parameter's shape and dtype."""
        return {"adamw": 2, "adamw-fused": 2, "sgd": 0, "sgd-momentum": 1}[self.value]


class Checkpointing(StrEnum):
    """What is kept for the backward pass: everything, or each block's input only."""

    NONE = "none"
    FULL = "full"


class Attention(StrEnum):
    """transformers' `attn_implementation`; `sdpa` is the kernel that CUDA would pick."""

    FLASH = "flash"
    SDPA = "sdpa"
    EAGER = "eager"


class Loss(StrEnum):
    """How the loss is computed; `standard` is transformers' causal-language-model loss."""

    STANDARD = "standard"


class Verdict(StrEnum):
    """Whether the upper bound, only the estimate, or neither is within the usable capacity."""

    FITS = "fits"
    TIGHT = "tight"
    OOM = "oom"


class EstimatorKind(StrEnum):
    """Which estimator answers; `auto`: the formula, or the dry run where the formula cannot."""

    AUTO = "auto"
    FORMULA = "formula"
    DRYRUN = "dryrun"


class Policy(StrEnum):
    """What is recommended of what fits: what is fastest here, or what LLMem's own rule chooses."""

    FASTEST = "fastest"
    LLMEM = "llmem"


ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


def parse_choice(kind: type[ChoiceT], value: str, *, key: str) -> ChoiceT:
    """The member of `kind` whose value is `value`.

    Raises:
        UserError: there is none; the line gives the nearest or all allowed values.
    """
    try:
        return kind(value)
    except ValueError:
        known = [str(member.value) for member in kind]
        raise unknown_name(key=key, value=value, known=known, what=f"values of {key}") from None
