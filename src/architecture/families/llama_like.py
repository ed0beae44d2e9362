"""Families a step away from llama: Granite, StarCoder2, OLMo 2, Phi-3."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder
from src.architecture.families.common import (
    Heads,
    attention_output,
    gathered,
    layer_norm,
    layer_norm_tail,
    plain_mlp,
    rms_norm_fp32,
    rms_tail,
    token_stem,
)
from src.architecture.families.llama import (
    QueryKeyNorms,
    RotaryAttention,
    model_decoder,
    read_gated_mlp,
    window_everywhere,
)
from src.architecture.families.residual import (
    Part,
    dropped,
    normed,
    residual_block,
    scaled,
    within_attention,
)
from src.architecture.fields import Fields
from src.architecture.ops import NormKind, Parallel


def granite(fields: Fields) -> Decoder:
    """Granite and PowerLM (transformers `modeling_granite.py`): llama with multipliers.

    The multiplications by `embedding_multiplier`, `residual_multiplier` and 1 / `logits_scaling`
    are always done, by 1 where absent. Other defaults as for llama.
    """
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias", default=False)
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
    )
    feed = read_gated_mlp(fields, bias=fields.flag("mlp_bias", default=False))
    block = residual_block(hidden, scaled(attend), scaled(feed))
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.layers("num_hidden_layers"),
        stem=token_stem(vocab=fields.integer("vocab_size"), width=hidden, scaled=True),
        head=_divided_head(fields, hidden),
    )


def _divided_head(fields: Fields, hidden: int) -> Block:
    build = BlockBuilder(width=hidden)
    tied = fields.flag("tie_word_embeddings", default=False)
    logits = build.linear("lm_head", "x", fields.integer("vocab_size"), tied=tied)
    return build.build(build.copy(logits, name="divided"))


def starcoder2(fields: Fields) -> Decoder:
    """StarCoder2 (transformers `modeling_starcoder2.py`): LayerNorm, biases, plain MLP.

    Defaults where absent: `use_bias` and `tie_word_embeddings` true, the dropouts 0, `hidden_act`
    gelu_pytorch_tanh, no `sliding_window`, 2 key/value heads.
    """
    hidden = fields.integer("hidden_size")
    bias = fields.flag("use_bias", default=True)
    dropout = fields.probability("residual_dropout")
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=2),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
    )
    intermediate = fields.integer("intermediate_size")
    function = fields.function("hidden_act", default="gelu_pytorch_tanh")

    def feed(build: BlockBuilder, source: str) -> str:
        build.prefix = "mlp."
        out = plain_mlp(
            build, source, intermediate, names=("c_fc", "c_proj"), function=function, bias=bias
        )
        build.prefix = ""
        return out

    block = residual_block(
        hidden,
        within_attention(dropped(attend, dropout)),
        dropped(feed, dropout),
        norm=layer_norm,
    )
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        tied_default=True,
        stem=token_stem(
            vocab=fields.integer("vocab_size"),
            width=hidden,
            dropout=fields.probability("embedding_dropout"),
        ),
        tail=layer_norm_tail(hidden, "model.norm"),
        windows=window_everywhere(fields, layers, default=None),
    )


def olmo2(fields: Fields) -> Decoder:
    """OLMo 2 (transformers `modeling_olmo2.py`): norms after, and on whole queries and keys.

    Positions are rotated in fp32; queries and keys return to their dtype. Defaults as for llama.
    """
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias", default=False)
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
        rotated_fp32=True,
        norms=QueryKeyNorms(kind=NormKind.RMS_FP32, at_once=True, whole=True),
    )
    block = residual_block(
        hidden,
        normed(attend, rms_norm_fp32, "post_attention_layernorm"),
        normed(read_gated_mlp(fields), rms_norm_fp32, "post_feedforward_layernorm"),
        norms=(None, None),
    )
    block = gathered(block, "q_proj", "k_proj", "v_proj", "o_proj")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.layers("num_hidden_layers"),
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
    )


def phi3(fields: Fields) -> Decoder:
    """Phi-3 (transformers `modeling_phi3.py`): llama with fused projections and residual dropout.

    Defaults where absent: the dropouts 0, `partial_rotary_factor` 1, `hidden_act` silu,
    `tie_word_embeddings` false, no `sliding_window`. `embd_pdrop` is not used by the code.
    """
    hidden = fields.integer("hidden_size")
    heads = Heads.read(fields, hidden)
    rotary_dim = heads.rotated_elements(fields, "partial_rotary_factor", default=1.0)
    dropout = fields.probability("attention_dropout")
    residual_dropout = fields.probability("resid_pdrop")

    def attend(build: BlockBuilder, source: str) -> str:
        build.prefix = "self_attn."
        query, key, value = heads.project_fused(build, "qkv_proj", source, bias=False)
        query, key = heads.rotate_part(build, query, key, rotary_dim)
        mixed = heads.attend(build, query, key, value, dropout=dropout)
        out = attention_output(build, "o_proj", mixed, hidden, bias=False)
        build.prefix = ""
        return out

    feed = _fused_gate(fields)
    block = residual_block(
        hidden, dropped(attend, residual_dropout), dropped(feed, residual_dropout)
    )
    block = gathered(block, "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        windows=window_everywhere(fields, layers, default=None),
    )


def _fused_gate(fields: Fields) -> Part:
    """Gate and up projection in one Linear, split by views."""
    intermediate = fields.integer("intermediate_size")
    function = fields.function("hidden_act", default="silu")

    def feed(build: BlockBuilder, source: str) -> str:
        hidden = build.width_of(source)
        build.prefix = "mlp."
        both = build.linear("gate_up_proj", source, 2 * intermediate, parallel=Parallel.COLUMN)
        gate = build.view(both, intermediate, name="gate")
        up = build.view(both, intermediate, name="up")
        product = build.multiply(up, build.activation(gate, function))
        out = build.linear("down_proj", product, hidden, parallel=Parallel.ROW)
        build.prefix = ""
        return out

    return feed
