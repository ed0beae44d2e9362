"""Gemma, Gemma 2 and Gemma 3: scaled embeddings, fp32 norms, capped scores or normed queries."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder
from src.architecture.families.common import (
    EAGER_AND_FLASH,
    Heads,
    rms_norm_fp32,
    rms_tail,
    token_stem,
)
from src.architecture.families.llama import (
    WINDOW,
    GatedMLP,
    QueryKeyNorms,
    RotaryAttention,
    model_decoder,
)
from src.architecture.families.residual import normed, residual_block
from src.architecture.fields import Fields
from src.architecture.ops import NormKind

HEAD_DIM = 256
TANH_GELU = "gelu_pytorch_tanh"
SANDWICH_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
GEMMA3_PATTERN = 6


def gemma(fields: Fields) -> Decoder:
    """Gemma (transformers `modeling_gemma.py`).

    Defaults where absent: `head_dim` 256, 16 key/value heads, `attention_bias` false,
    `attention_dropout` 0, `tie_word_embeddings` true, `hidden_act` gelu_pytorch_tanh, which "gelu"
    also stands for.
    """
    hidden = fields.integer("hidden_size")
    function = fields.function("hidden_act", default=TANH_GELU)
    feed = GatedMLP(
        intermediate=fields.integer("intermediate_size"),
        function=TANH_GELU if function == "gelu" else function,
    )
    block = residual_block(
        hidden, _attention(fields, hidden, kv_heads=16), feed, norm=rms_norm_fp32
    )
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.layers("num_hidden_layers"),
        tied_default=True,
        stem=_stem(fields, hidden),
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
    )


def gemma2(fields: Fields) -> Decoder:
    """Gemma 2 (transformers `modeling_gemma2.py`): norms on both sides, capped scores and logits.

    Defaults where absent: as for Gemma, with 4 key/value heads and `hidden_activation`;
    `attn_logit_softcapping` 50, `final_logit_softcapping` 30 (null stands for none),
    `sliding_window` 4096 in every other block. There is no SDPA path, whether the scores are
    capped or not.
    """
    hidden = fields.integer("hidden_size")
    capped = fields.positive("attn_logit_softcapping", default=50.0) is not None
    block = _sandwich_block(fields, hidden, _attention(fields, hidden, kv_heads=4, softcap=capped))
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        tied_default=True,
        stem=_stem(fields, hidden),
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
        head=_capped_head(fields, hidden, default=30.0),
        implementations=EAGER_AND_FLASH,
        windows=fields.alternating_windows(layers, pattern=2, default=WINDOW),
    )


def gemma3_text(fields: Fields) -> Decoder:
    """Gemma 3, text only (transformers `modeling_gemma3.py`): normed queries and keys.

    Defaults where absent: as for Gemma 2, but `final_logit_softcapping` none, and
    `sliding_window_pattern` 6. `attn_logit_softcapping` is not used by the code.
    """
    hidden = fields.integer("hidden_size")
    attend = _attention(fields, hidden, kv_heads=4, norms=QueryKeyNorms(kind=NormKind.RMS_FP32))
    block = _sandwich_block(fields, hidden, attend)
    layers = fields.layers("num_hidden_layers")
    pattern = fields.optional_integer("sliding_window_pattern") or GEMMA3_PATTERN
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        tied_default=True,
        stem=_stem(fields, hidden),
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
        head=_capped_head(fields, hidden, default=None),
        windows=fields.alternating_windows(layers, pattern=pattern, default=WINDOW),
    )


def _stem(fields: Fields, hidden: int) -> Block:
    return token_stem(vocab=fields.integer("vocab_size"), width=hidden, scaled=True)


def _attention(
    fields: Fields,
    hidden: int,
    *,
    kv_heads: int,
    norms: QueryKeyNorms | None = None,
    softcap: bool = False,
) -> RotaryAttention:
    bias = fields.flag("attention_bias", default=False)
    return RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=kv_heads, absent_head_dim=HEAD_DIM),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
        norms=norms,
        softcap=softcap,
    )


def _sandwich_block(fields: Fields, hidden: int, attend: RotaryAttention) -> Block:
    """A norm before and after attention, and before and after the MLP."""
    fields.divisible("hidden_size", hidden, "num_attention_heads", attend.heads.num_heads)
    feed = GatedMLP(
        intermediate=fields.integer("intermediate_size"),
        function=fields.function("hidden_activation", default=TANH_GELU),
    )
    return residual_block(
        hidden,
        normed(attend, rms_norm_fp32, "post_attention_layernorm"),
        normed(feed, rms_norm_fp32, "post_feedforward_layernorm"),
        norms=SANDWICH_NORMS,
        norm=rms_norm_fp32,
    )


def _capped_head(fields: Fields, hidden: int, *, default: float | None) -> Block:
    """Logits, divided by the cap, through a tanh, and multiplied by it."""
    build = BlockBuilder(width=hidden)
    tied = fields.flag("tie_word_embeddings", default=True)
    logits = build.linear("lm_head", "x", fields.integer("vocab_size"), tied=tied)
    if fields.positive("final_logit_softcapping", default=default) is not None:
        logits = build.copy(build.activation(build.copy(logits), "tanh"))
    return build.build(logits)
