"""Falcon: one fused projection with few key/value heads, attention and MLP in parallel."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    EAGER_AND_SDPA,
    Heads,
    attention_output,
    layer_norm,
    layer_norm_tail,
    lm_head,
    plain_mlp,
    token_stem,
)
from src.architecture.fields import Fields


def falcon(fields: Fields) -> Decoder:
    """Falcon (transformers `modeling_falcon.py`).

    Defaults where absent: `multi_query`, `parallel_attn` and `tie_word_embeddings` true,
    `new_decoder_architecture`, `alibi` and `bias` false, the dropouts 0, `activation` gelu,
    `ffn_hidden_size` 4 x hidden, `num_kv_heads` as many as heads. The causal mask is always
    materialised, so that SDPA never sees a plain causal attention; without ALiBi there is no
    dropout on the attention weights.
    """
    hidden = fields.integer("hidden_size", "n_embed")
    vocab = fields.integer("vocab_size")
    layers = fields.layers("num_hidden_layers")
    alibi = fields.flag("alibi", default=False)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=token_stem(vocab=vocab, width=hidden, name="transformer.word_embeddings"),
        blocks=(_block(fields, hidden),) * layers,
        blocks_path="transformer.h",
        tail=layer_norm_tail(hidden, "transformer.ln_f"),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=True)),
        positions=Positions.ALIBI if alibi else Positions.ROTARY,
        max_positions=None if alibi else fields.integer("max_position_embeddings"),
        implementations=EAGER_AND_SDPA if alibi else ALL_IMPLEMENTATIONS,
    )


def _block(fields: Fields, hidden: int) -> Block:
    new = fields.flag("new_decoder_architecture", default=False)
    parallel = fields.flag("parallel_attn", default=True)
    if new and not parallel:
        allowed = "true, as new_decoder_architecture needs it"
        raise fields.error("parallel_attn", False, allowed)
    build = BlockBuilder(width=hidden, plain_linears=False)  # its own FalconLinear
    attention_norm, mlp_norm = _norms(fields, build, new=new, parallel=parallel)
    attended = _attention(fields, build, attention_norm, new=new)
    residual = "x"
    if not parallel:
        dropout = fields.probability("attention_dropout")
        residual = build.add("x", build.dropout(attended, dropout))
        mlp_norm = layer_norm(build, "post_attention_layernorm", residual)
    build.prefix = "mlp."
    out = plain_mlp(
        build,
        mlp_norm,
        fields.optional_integer("ffn_hidden_size") or 4 * hidden,
        names=("dense_h_to_4h", "dense_4h_to_h"),
        function=fields.function("activation", default="gelu"),
        bias=fields.flag("bias", default=False),
    )
    if parallel:
        out = build.add(out, attended, in_place=True)
    out = build.dropout(out, fields.probability("hidden_dropout"))
    return build.build(build.add(residual, out))


def _norms(fields: Fields, build: BlockBuilder, *, new: bool, parallel: bool) -> tuple[str, str]:
    """What attention and MLP read: of one norm, or each of its own."""
    norms = fields.optional_integer("num_ln_in_parallel_attn") or (2 if new else 1)
    if norms > 2 or (norms == 2 and parallel and not new):
        allowed = "1, or 2 with new_decoder_architecture"
        raise fields.error("num_ln_in_parallel_attn", norms, allowed)
    if new and norms == 2:
        return layer_norm(build, "ln_attn", "x"), layer_norm(build, "ln_mlp", "x")
    normed = layer_norm(build, "input_layernorm", "x")
    return normed, normed


def _attention(fields: Fields, build: BlockBuilder, source: str, *, new: bool) -> str:
    hidden = build.width_of("x")
    heads = Heads.split(fields, hidden, "num_attention_heads")
    bias = fields.flag("bias", default=False)
    alibi = fields.flag("alibi", default=False)
    build.prefix = "self_attention."
    heads, query, key, value = _query_key_value(fields, build, heads, source, new=new, bias=bias)
    if not alibi:
        query, key = heads.rotate(build, query, key)
    mixed = heads.attend(
        build,
        query,
        key,
        value,
        dropout=fields.probability("attention_dropout") if alibi else 0.0,
        softmax_fp32=False,
        alibi=alibi,
        explicit_mask=True,
    )
    out = attention_output(build, "dense", mixed, hidden, bias=bias)
    build.prefix = ""
    return out


def _query_key_value(
    fields: Fields, build: BlockBuilder, heads: Heads, source: str, *, new: bool, bias: bool
) -> tuple[Heads, str, str, str]:
    """The heads that attention sees, and its three inputs.

    The new architecture copies queries out of the projection and repeats keys and values to all
    heads; the old one with one key/value head copies that one out.
    """
    num_heads, head_dim = heads.num_heads, heads.head_dim
    if not new and not fields.flag("multi_query", default=True):
        return heads, *heads.project_fused(build, "query_key_value", source, bias=bias)
    num_kv_heads = (fields.optional_integer("num_kv_heads") or num_heads) if new else 1
    fields.divisible("num_attention_heads", num_heads, "num_kv_heads", num_kv_heads)
    few = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    query, key, value = few.project_fused(build, "query_key_value", source, bias=bias)
    key, value = build.copy(key), build.copy(value)
    if not new:
        return few, query, key, value
    key, value = (build.copy(one, heads.query_width) for one in (key, value))
    return heads, build.copy(query), key, value
