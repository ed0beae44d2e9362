"""Qwen2 and Qwen3: the llama shape with biases or norms on queries and keys."""

from __future__ import annotations

from src.architecture.decoder import Decoder
from src.architecture.families.common import Heads
from src.architecture.families.llama import (
    WINDOW,
    QueryKeyNorms,
    RotaryAttention,
    model_decoder,
    read_gated_mlp,
)
from src.architecture.families.residual import residual_block
from src.architecture.fields import Fields
from src.architecture.ops import NormKind

QWEN3_HEAD_DIM = 128
KV_HEADS = 32
FIRST_WINDOW_LAYER = 28


def qwen2(fields: Fields) -> Decoder:
    """Qwen1.5, Qwen2 and Qwen2.5 (transformers `modeling_qwen2.py`): q, k and v have biases.

    Defaults where absent: 32 key/value heads, `tie_word_embeddings` and `use_sliding_window` false,
    `attention_dropout` 0, `hidden_act` silu.
    """
    hidden = fields.integer("hidden_size")
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=KV_HEADS),
        bias=True,
        output_bias=False,
        dropout=fields.probability("attention_dropout"),
    )
    block = residual_block(hidden, attend, read_gated_mlp(fields))
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields, hidden=hidden, blocks=(block,) * layers, windows=upper_windows(fields, layers)
    )


def qwen3(fields: Fields) -> Decoder:
    """Qwen3 (transformers `modeling_qwen3.py`): a norm over each head of queries and keys.

    Defaults where absent: `head_dim` 128, 32 key/value heads, `attention_bias`,
    `tie_word_embeddings` and `use_sliding_window` false, `attention_dropout` 0, `hidden_act` silu.
    """
    hidden = fields.integer("hidden_size")
    heads = Heads.read(fields, hidden, absent_kv_heads=KV_HEADS, absent_head_dim=QWEN3_HEAD_DIM)
    attend = qwen3_attention(fields, heads)
    block = residual_block(hidden, attend, read_gated_mlp(fields))
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields, hidden=hidden, blocks=(block,) * layers, windows=upper_windows(fields, layers)
    )


def qwen3_attention(fields: Fields, heads: Heads) -> RotaryAttention:
    """Attention of Qwen3 and its mixture of experts."""
    bias = fields.flag("attention_bias", default=False)
    return RotaryAttention(
        heads=heads,
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
        norms=QueryKeyNorms(kind=NormKind.RMS, at_once=True),
    )


def upper_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """With `use_sliding_window`: the blocks of `layer_types`, or from `max_window_layers` on.

    Defaults where absent: `sliding_window` 4096, `max_window_layers` 28.
    """
    window = fields.nullable("sliding_window", WINDOW)
    if window is None or not fields.flag("use_sliding_window", default=False):
        return ()
    sliding = fields.sliding_layers(layers)
    if sliding is None:
        first = fields.count("max_window_layers", default=FIRST_WINDOW_LAYER)
        sliding = tuple(index >= first for index in range(layers))
    return tuple(window if slides else None for slides in sliding)
