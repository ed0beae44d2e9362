"""Which attention kernel runs: the rules of PyTorch's `sdp_utils.cpp` for one GPU and dtype."""

from __future__ import annotations

from enum import StrEnum

from src.architecture import Decoder
from src.architecture.ops import Attention as AttentionOp
from src.errors import UserError
from src.spec import Attention, Gpu, Job, Precision, Upcast

FLASH_MAX_HEAD_DIM = 256
FLASH_MIN_COMPUTE_CAPABILITY = (8, 0)


class Kernel(StrEnum):
    """How scores, softmax and weighting are computed; each keeps other tensors for backward."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    MATH = "math"
    EAGER = "eager"


def implementation(decoder: Decoder, job: Job) -> Attention:
    """The attention implementation that transformers takes.

    transformers falls back to eager by itself where `sdpa`, its default, does not exist for a
    family; asked for `flash` it refuses.

    Raises:
        UserError: `attention=flash` on a family or at a precision that has none.
    """
    if job.attention is Attention.FLASH:
        if Attention.FLASH not in decoder.implementations:
            allowed = ", ".join(sorted(decoder.implementations))
            raise UserError(
                key="attention",
                value="flash",
                allowed=f"transformers has no flash attention for {decoder.model_type}; {allowed}",
            )
        if job.precision.compute_bytes != 2:
            raise UserError(
                key="attention", value="flash", allowed="needs a half precision, not precision=fp32"
            )
    if job.attention not in decoder.implementations:
        return Attention.EAGER
    return job.attention


def attention_bytes(job: Job) -> int:
    """Bytes per element of queries, keys and values.

    Quantised Linears answer in their input's dtype: outside autocast fp32, where the embeddings
    have been turned to it.
    """
    upcast = job.finetune.is_quantized and job.finetune.upcast is Upcast.ALL
    return 4 if upcast and not job.precision.is_mixed else job.precision.compute_bytes


def choose_kernel(decoder: Decoder, job: Job, gpu: Gpu, *, masked: bool = False) -> Kernel:
    """The kernel that CUDA runs for a job on a GPU, where attention is given a mask or not.

    Flash needs a half precision, compute capability 8.0, heads of equal widths up to 256, and no
    additive mask. The memory-efficient kernel takes masks and fp32, but no grouped key and value
    heads, no bf16 before compute capability 8.0 and only heads of a multiple of 8 (fp32: 4); what
    neither takes goes to the math kernel.

    Raises:
        UserError: `attention=flash` where the GPU, the family or the precision has none.
    """
    chosen = implementation(decoder, job)
    old_gpu = gpu.compute_capability < FLASH_MIN_COMPUTE_CAPABILITY
    if chosen is Attention.FLASH and old_gpu:
        major, minor = gpu.compute_capability
        raise UserError(
            key="attention",
            value="flash",
            allowed=f"needs compute capability 8.0; {gpu.sku} has {major}.{minor}; sdpa or eager",
        )
    if chosen is Attention.EAGER:
        return Kernel.EAGER
    if chosen is Attention.FLASH:
        return Kernel.FLASH
    heads = decoder.attention
    masked = masked or heads.alibi or heads.explicit_mask
    plain = not masked and not heads.softcap and heads.sinks_name is None
    same_width = heads.head_dim == heads.value_head_dim
    half = attention_bytes(job) == 2
    if plain and same_width and half and not old_gpu:
        if heads.head_dim <= FLASH_MAX_HEAD_DIM:
            return Kernel.FLASH
        return Kernel.MATH
    if half and job.precision in (Precision.BF16_MIXED, Precision.BF16_TRUE) and old_gpu:
        return Kernel.MATH
    if heads.num_kv_heads != heads.num_heads and _keeps_groups(heads, masked=masked):
        return Kernel.MATH
    aligned = heads.head_dim % (8 if half else 4) == 0
    return Kernel.EFFICIENT if aligned else Kernel.MATH


def _keeps_groups(heads: AttentionOp, *, masked: bool) -> bool:
    """Whether key and value heads reach SDPA grouped; transformers repeats them under a mask.

    falcon hands its one key/value head to SDPA as it is, mask or not.
    """
    if heads.explicit_mask:
        return True
    same_width = heads.head_dim == heads.value_head_dim
    return not masked and same_width and heads.head_dim <= FLASH_MAX_HEAD_DIM
