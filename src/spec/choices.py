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
    HSDP = "hsdp"
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
        return self in (Method.FSDP, Method.FSDP_GRAD, Method.HSDP, Method.FSDP_TP)

    @property
    def has_tensor_parallel(self) -> bool:
        """Whether every Linear of a block is split over a tensor-parallel group."""
        return self in (Method.TP, Method.DDP_TP, Method.FSDP_TP)

    @property
    def has_ddp(self) -> bool:
        """Whether `DistributedDataParallel` averages the gradients."""
        return self in (Method.DDP, Method.DDP_TP)


class FinetuneKind(StrEnum):
    """Which parameters are trained.

    `full`: all; `freeze`: those of the last blocks; `lora`: PEFT's adapters on a frozen model;
    `qlora`: the same on a quantised one; `prefix`, `prompt`: PEFT's virtual tokens, as keys and
    values of every block or as embeddings in front of the sequence.
    """

    FULL = "full"
    FREEZE = "freeze"
    LORA = "lora"
    QLORA = "qlora"
    PREFIX = "prefix"
    PROMPT = "prompt"


class Quantization(StrEnum):
    """How bitsandbytes stores the frozen Linears of a block: 4-bit NormalFloat, or LLM.int8()."""

    NF4 = "nf4"
    INT8 = "int8"


class Upcast(StrEnum):
    """What of a quantised model is turned to fp32 before training.

    `all`: everything that is not quantised (PEFT's `prepare_model_for_kbit_training`); `norms`: the
    norms alone (TRL turns the rest back); `none`: nothing.
    """

    ALL = "all"
    NORMS = "norms"
    NONE = "none"


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
    """Implementations as they run on CUDA.

    `adamw`, `sgd`, `sgd-momentum`: PyTorch's foreach ones; `adamw-fused`: the fused kernel;
    `adamw-loop`: parameter by parameter; `adamw-8bit`, `lion`, `paged-*`: bitsandbytes' (paged
    states live in managed memory, outside the allocator); `adafactor`: transformers'; `muon`:
    PyTorch's for the blocks' matrices, fused AdamW for everything else.
    """

    ADAMW = "adamw"
    ADAMW_FUSED = "adamw-fused"
    ADAMW_LOOP = "adamw-loop"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW = "paged-adamw"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    ADAFACTOR = "adafactor"
    LION = "lion"
    MUON = "muon"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"

    @property
    def states_per_parameter(self) -> int:
        """Full-size state tensors, whatever their dtype (Adafactor's are rows and columns)."""
        if self in (Optimizer.SGD, Optimizer.ADAFACTOR):
            return 0
        return 1 if self in (Optimizer.SGD_MOMENTUM, Optimizer.LION, Optimizer.MUON) else 2


class Checkpointing(StrEnum):
    """What is kept for the backward pass.

    `none`: everything; `full`: the input of each block (of every `checkpoint_every`-th one alone,
    where that is above 1); `selective`: everything but what is inside the attention module, whose
    input is kept.
    """

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class Offload(StrEnum):
    """What lives in host memory between uses: nothing, optimizer states, or parameters too."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"


class Attention(StrEnum):
    """transformers' `attn_implementation`; `sdpa` is the kernel that CUDA would pick."""

    FLASH = "flash"
    SDPA = "sdpa"
    EAGER = "eager"


class Loss(StrEnum):
    """How the loss is computed.

    `standard`: transformers 5's causal-language-model loss; `standard-4x`: that of transformers
    4.x, which turns all logits to fp32 and keeps a shifted copy of them; `chunked`: head and loss
    on one eighth of the tokens at a time, each recomputed in the backward pass; `liger`: Liger's
    fused linear cross entropy.
    """

    STANDARD = "standard"
    STANDARD_4X = "standard-4x"
    CHUNKED = "chunked"
    LIGER = "liger"


class Verdict(StrEnum):
    """Whether the upper bound, only the estimate, or neither is within the usable capacity."""

    FITS = "fits"
    TIGHT = "tight"
    OOM = "oom"


class EstimatorKind(StrEnum):
    """Which estimator answers.

    `calibrated`: the formula, corrected by what measured rows taught; `auto`: that, where there is
    a correction, else the formula; the dry run where the formula cannot.
    """

    AUTO = "auto"
    FORMULA = "formula"
    CALIBRATED = "calibrated"
    DRYRUN = "dryrun"
    LLMEM = "llmem"


class Runtime(StrEnum):
    """What runs the step: PyTorch (with DeepSpeed for `zero*`), or Colossal-AI's Gemini."""

    PYTORCH = "pytorch"
    GEMINI = "gemini"


class Policy(StrEnum):
    """What is recommended of what fits: what is fastest here, or what LLMem's own rule chooses."""

    FASTEST = "fastest"
    LLMEM = "llmem"


class Unknown(StrEnum):
    """A field that is left open, to be found: the largest value that fits, of GPUs the fewest."""

    MICRO_BATCH = "micro_batch"
    SEQ_LEN = "seq_len"
    GPUS = "gpus"
    LORA_R = "lora_r"
    GPU = "gpu"


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
