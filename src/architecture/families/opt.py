"""The fairseq shape: learned positions with two extra rows, separate projections, plain MLP."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    Heads,
    attention_output,
    layer_norm,
    layer_norm_tail,
    lm_head,
    plain_mlp,
)
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind, Parallel

OFFSET_ROWS = 2


def opt(fields: Fields) -> Decoder:
    """OPT (transformers `modeling_opt.py`).

    Defaults where absent: `do_layer_norm_before`, `enable_bias`, `layer_norm_elementwise_affine`
    and `tie_word_embeddings` true, `_remove_final_layer_norm` false, `dropout` 0.1,
    `attention_dropout` 0, `word_embed_proj_dim` the hidden size. `activation_dropout` is not used
    by the code; `layerdrop` skips whole blocks at random and is taken as 0, the fullest case.
    """
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    positions = fields.integer("max_position_embeddings")
    embedding_width = fields.optional_integer("word_embed_proj_dim") or hidden
    tied = fields.flag("tie_word_embeddings", default=True)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=_opt_stem(vocab, embedding_width, positions, hidden),
        blocks=(_opt_block(fields, hidden),) * fields.layers("num_hidden_layers"),
        blocks_path="model.decoder.layers",
        tail=_opt_tail(fields, hidden, embedding_width),
        head=lm_head(embedding_width, vocab, tied=tied),
        positions=Positions.LEARNED,
        max_positions=positions,
        implementations=ALL_IMPLEMENTATIONS,
    )


def _opt_stem(vocab: int, embedding_width: int, positions: int, hidden: int) -> Block:
    build = BlockBuilder(prefix="model.decoder.")
    tokens = build.embed(
        "embed_tokens", rows=vocab, width=embedding_width, kind=EmbeddingKind.TOKEN
    )
    places = build.embed(
        "embed_positions",
        rows=positions + OFFSET_ROWS,
        width=hidden,
        kind=EmbeddingKind.POSITION,
    )
    if embedding_width != hidden:
        tokens = build.linear("project_in", tokens, hidden)
    return build.build(build.add(tokens, places))


def _opt_tail(fields: Fields, hidden: int, embedding_width: int) -> Block:
    build = BlockBuilder(width=hidden, prefix="model.decoder.")
    removed = fields.flag("_remove_final_layer_norm", default=False)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    out = "x"
    if fields.flag("do_layer_norm_before", default=True) and not removed:
        out = layer_norm(build, "final_layer_norm", out, affine=affine)
    if embedding_width != hidden:
        out = build.linear("project_out", out, embedding_width)
    return build.build(out)


def _opt_block(fields: Fields, hidden: int) -> Block:
    heads = Heads.split(fields, hidden, "num_attention_heads")
    before = fields.flag("do_layer_norm_before", default=True)
    bias = fields.flag("enable_bias", default=True)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    dropout = fields.probability("dropout", default=0.1)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "self_attn_layer_norm", "x", affine=affine) if before else "x"
    attended = _opt_attention(
        build, normed, heads, bias=bias, dropout=fields.probability("attention_dropout")
    )
    middle = build.add("x", build.dropout(attended, dropout))
    if not before:
        middle = layer_norm(build, "self_attn_layer_norm", middle, affine=affine)
    normed = layer_norm(build, "final_layer_norm", middle, affine=affine) if before else middle
    out = plain_mlp(
        build,
        normed,
        fields.integer("ffn_dim"),
        names=("fc1", "fc2"),
        function=fields.function("activation_function", default="relu"),
        bias=bias,
        flat=True,
    )
    out = build.add(middle, build.dropout(out, dropout))
    if not before:
        out = layer_norm(build, "final_layer_norm", out, affine=affine)
    return build.build(out)


def _opt_attention(
    build: BlockBuilder, source: str, heads: Heads, *, bias: bool, dropout: float
) -> str:
    """Queries are scaled before attention: a tensor of their own."""
    build.prefix = "self_attn."
    query, key, value = (
        build.linear(
            name, source, heads.query_width, bias=bias, parallel=Parallel.COLUMN, is_attention=True
        )
        for name in ("q_proj", "k_proj", "v_proj")
    )
    scaled = build.copy(query, name="scaled")
    mixed = heads.attend(build, scaled, key, value, dropout=dropout)
    out = attention_output(build, "out_proj", mixed, heads.query_width, bias=bias)
    build.prefix = ""
    return out


def biogpt(fields: Fields) -> Decoder:
    """BioGPT (transformers `modeling_biogpt.py`).

    Defaults where absent: `hidden_dropout_prob` and `attention_probs_dropout_prob` 0.1,
    `activation_dropout` 0, `scale_embedding` and `tie_word_embeddings` true. `layerdrop` is taken
    as 0, the fullest case.
    """
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    positions = fields.integer("max_position_embeddings")
    tied = fields.flag("tie_word_embeddings", default=True)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=_biogpt_stem(fields, vocab, positions, hidden),
        blocks=(_biogpt_block(fields, hidden),) * fields.layers("num_hidden_layers"),
        blocks_path="biogpt.layers",
        tail=layer_norm_tail(hidden, "biogpt.layer_norm"),
        head=lm_head(hidden, vocab, tied=tied, name="output_projection"),
        positions=Positions.LEARNED,
        max_positions=positions,
        implementations=ALL_IMPLEMENTATIONS,
    )


def _biogpt_stem(fields: Fields, vocab: int, positions: int, hidden: int) -> Block:
    """The embedding is always multiplied, by 1 where `scale_embedding` is false."""
    build = BlockBuilder(prefix="biogpt.")
    tokens = build.embed("embed_tokens", rows=vocab, width=hidden, kind=EmbeddingKind.TOKEN)
    scaled = build.copy(tokens, name="scaled")
    places = build.embed(
        "embed_positions",
        rows=positions + OFFSET_ROWS,
        width=hidden,
        kind=EmbeddingKind.POSITION,
    )
    fields.flag("scale_embedding", default=True)
    dropout = fields.probability("hidden_dropout_prob", default=0.1)
    return build.build(build.dropout(build.add(scaled, places), dropout))


def _biogpt_block(fields: Fields, hidden: int) -> Block:
    heads = Heads.split(fields, hidden, "num_attention_heads")
    dropout = fields.probability("hidden_dropout_prob", default=0.1)
    attention_dropout = fields.probability("attention_probs_dropout_prob", default=0.1)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "self_attn_layer_norm", "x")
    build.prefix = "self_attn."
    query, key, value = heads.project(build, normed, bias=True)
    mixed = heads.attend(build, query, key, value, dropout=attention_dropout, softmax_fp32=False)
    attended = attention_output(build, "out_proj", mixed, hidden, bias=True)
    build.prefix = ""
    middle = build.add("x", build.dropout(attended, dropout))
    out = plain_mlp(
        build,
        layer_norm(build, "final_layer_norm", middle),
        fields.integer("intermediate_size"),
        names=("fc1", "fc2"),
        function=fields.function("hidden_act", default="gelu"),
        inner_dropout=fields.probability("activation_dropout"),
    )
    return build.build(build.add(middle, build.dropout(out, dropout)))
