"""BLOOM: no positions in the stream, a bias per head on the scores, a norm after the embedding."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    EAGER_ONLY,
    Heads,
    attention_output,
    layer_norm,
    layer_norm_tail,
    lm_head,
    plain_mlp,
)
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind

# A function of BLOOM's own; it keeps its input alone, as the fused tanh approximation does.
BLOOM_GELU = "gelu_pytorch_tanh"


def bloom(fields: Fields) -> Decoder:
    """BLOOM (transformers `modeling_bloom.py`).

    Defaults where absent: `hidden_dropout` and `attention_dropout` 0, `tie_word_embeddings` true,
    `apply_residual_connection_post_layernorm` false. `slow_but_exact` together with
    `pretraining_tp` above 1 slices the output projections and is not described.
    """
    if (fields.optional_integer("pretraining_tp") or 1) > 1:
        fields.refuse("slow_but_exact")
    hidden = fields.integer("hidden_size", "n_embed")
    vocab = fields.integer("vocab_size")
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=_bloom_stem(vocab, hidden),
        blocks=(_bloom_block(fields, hidden),) * fields.layers("n_layer", "num_hidden_layers"),
        blocks_path="transformer.h",
        tail=layer_norm_tail(hidden, "transformer.ln_f"),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=True)),
        positions=Positions.ALIBI,
        max_positions=None,
        implementations=EAGER_ONLY,
    )


def _bloom_stem(vocab: int, hidden: int) -> Block:
    build = BlockBuilder(prefix="transformer.")
    tokens = build.embed("word_embeddings", rows=vocab, width=hidden, kind=EmbeddingKind.TOKEN)
    return build.build(layer_norm(build, "word_embeddings_layernorm", tokens))


def _bloom_block(fields: Fields, hidden: int) -> Block:
    """Query, key and value are copied out of the projection to merge batch and heads."""
    heads = Heads.split(fields, hidden, "n_head", "num_attention_heads")
    dropout = fields.probability("hidden_dropout")
    after_norm = fields.flag("apply_residual_connection_post_layernorm", default=False)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "input_layernorm", "x")
    residual = normed if after_norm else "x"
    build.prefix = "self_attention."
    query, key, value = (
        build.copy(part)
        for part in heads.project_fused(build, "query_key_value", normed, bias=True)
    )
    mixed = heads.attend(
        build, query, key, value, dropout=fields.probability("attention_dropout"), alibi=True
    )
    attended = attention_output(build, "dense", mixed, hidden, bias=True)
    build.prefix = ""
    middle = build.add(residual, build.dropout(attended, dropout))
    build.end_attention()
    normed = layer_norm(build, "post_attention_layernorm", middle)
    build.prefix = "mlp."
    out = plain_mlp(
        build, normed, 4 * hidden, names=("dense_h_to_4h", "dense_4h_to_h"), function=BLOOM_GELU
    )
    residual = normed if after_norm else middle
    return build.build(build.add(residual, build.dropout(out, dropout)))
