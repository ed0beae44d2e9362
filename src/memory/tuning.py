"""What a kind of fine-tuning does to the operations of a model, and how it stores their weights.

Letters: N weights of a Linear, O its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture import Decoder
from src.architecture.ops import Linear, Op
from src.errors import UserError
from src.memory.size import FLOAT_BYTES
from src.spec import Finetune, FinetuneKind, Quantization

SCALE_BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a scale; scales that share one with double quantisation (bitsandbytes)."""

CODE_ENTRIES, NESTED_CODE_ENTRIES = 16, 256
"""fp32 entries of the tables that NF4's codes and quantised scales stand for, one each per Linear
(`QuantState`, bitsandbytes/functional.py)."""


def is_target(op: Linear, finetune: Finetune, head: str) -> bool:
    """Whether LoRA adapts this Linear; `head`: name of the one that makes the logits.

    PEFT takes a target that is a module's name or ends it, at a dot; `all-linear` leaves the head
    alone (`_maybe_include_all_linear_layers`, peft/tuners/tuners_utils.py).
    """
    if not finetune.is_lora or not op.is_module or op.name == head:
        return False
    if not finetune.targets:
        return op.is_attention
    name = f".{op.name}"
    return finetune.targets == ("all-linear",) or any(
        name.endswith(f".{target}") for target in finetune.targets
    )


def is_quantised(op: Op, finetune: Finetune, head: str) -> bool:
    """Whether bitsandbytes stores this operation's weight.

    transformers replaces every Linear but the head (`replace_with_bnb_linear`), since 5.0 none
    of a subclass (falcon's); weights of stacked experts and of routers are no modules.
    """
    return (
        finetune.is_quantized
        and isinstance(op, Linear)
        and op.is_module
        and op.is_plain
        and op.name != head
    )


_FOUR_DIMENSIONAL = frozenset({"deepseek_v2"})
"""Families that hand a Linear (`kv_b_proj`) an input of four dimensions."""


def check_int8(finetune: Finetune, model_type: str) -> None:
    """Refuse int8 where bitsandbytes' product does (`_int8_linear_matmul_impl`).

    Raises:
        UserError: names what can be stored instead.
    """
    is_int8 = finetune.is_quantized and finetune.quantization is Quantization.INT8
    if is_int8 and model_type in _FOUR_DIMENSIONAL:
        raise UserError(
            key="finetune.quantization",
            value=finetune.quantization,
            allowed=f"nf4: {model_type} has inputs of four dimensions, int8 products take three",
        )


def check_prompt(finetune: Finetune, decoder: Decoder) -> None:
    """Refuse prompts where PEFT makes them wider than the embeddings they are put in front of.

    Raises:
        UserError: the embeddings are projected to another width (opt-350m).
    """
    width = decoder.token_embedding.width
    if finetune.kind is FinetuneKind.PROMPT and width != decoder.hidden_size:
        raise UserError(
            key="finetune",
            value=finetune.kind,
            allowed=f"not for embeddings of {width} before hidden states of {decoder.hidden_size}",
        )


def check_trained_blocks(finetune: Finetune, num_blocks: int) -> None:
    """Refuse to train more blocks than there are.

    Raises:
        UserError: says how many there are.
    """
    if finetune.kind is FinetuneKind.FREEZE and finetune.trained_blocks > num_blocks:
        raise UserError(
            key="finetune.trained_blocks",
            value=finetune.trained_blocks,
            allowed=f"at most the {num_blocks} blocks of the model",
        )


def trains_block(finetune: Finetune, index: int, num_blocks: int) -> bool:
    """Whether the own parameters of block `index` are trained."""
    if finetune.kind is FinetuneKind.FREEZE:
        return index >= num_blocks - finetune.trained_blocks
    return finetune.trains_everything


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How a quantised weight lies.

    Attributes:
        weight_bytes: of the packed weight.
        rows: its first dimension, along which FSDP splits it.
        statistics_bytes: of scales and tables beside it.
    """

    weight_bytes: int
    rows: int
    statistics_bytes: int


def storage_of(finetune: Finetune, *, outputs: int, numel: int) -> Storage:
    """NF4: N/2 bytes, a scale for each 64 weights: fp32, or one byte and fp32 for each 256 of them.

    int8: N bytes and an fp32 scale for each of O outputs.
    """
    if finetune.quantization is Quantization.INT8:
        return Storage(weight_bytes=numel, rows=outputs, statistics_bytes=outputs * FLOAT_BYTES)
    packed, scales = -(-numel // 2), -(-numel // SCALE_BLOCK)
    if finetune.double_quant:
        nested = -(-scales // NESTED_BLOCK) + NESTED_CODE_ENTRIES + 1
        statistics = scales + (nested + CODE_ENTRIES) * FLOAT_BYTES
    else:
        statistics = (scales + CODE_ENTRIES) * FLOAT_BYTES
    return Storage(weight_bytes=packed, rows=packed, statistics_bytes=statistics)
