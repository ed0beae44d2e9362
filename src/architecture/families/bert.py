"""BERT as a causal language model: post-norm blocks, three embeddings, a head with a transform."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    Heads,
    attention_output,
    layer_norm,
    plain_mlp,
)
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind

INDEX_BYTES = 8


def bert(fields: Fields) -> Decoder:
    """`BertLMHeadModel` with `is_decoder` (transformers `modeling_bert.py`).

    Defaults where absent: `hidden_dropout_prob` and `attention_probs_dropout_prob` 0.1,
    `hidden_act` gelu, `tie_word_embeddings` true. The head's weight and bias are tied; an untied
    head is not described. Position and token type indices are kept as buffers.
    """
    fields.refuse("add_cross_attention")
    if not fields.flag("tie_word_embeddings", default=True):
        raise fields.error("tie_word_embeddings", False, "only true is supported")
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    positions = fields.integer("max_position_embeddings")
    tail = BlockBuilder(width=hidden)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=_stem(fields, vocab, positions, hidden),
        blocks=(_block(fields, hidden),) * fields.layers("num_hidden_layers"),
        blocks_path="bert.encoder.layer",
        tail=tail.build("x"),
        head=_head(fields, vocab, hidden),
        positions=Positions.LEARNED,
        max_positions=positions,
        implementations=ALL_IMPLEMENTATIONS,
        buffer_bytes=2 * positions * INDEX_BYTES,
    )


def _stem(fields: Fields, vocab: int, positions: int, hidden: int) -> Block:
    build = BlockBuilder(prefix="bert.embeddings.")
    tokens = build.embed("word_embeddings", rows=vocab, width=hidden, kind=EmbeddingKind.TOKEN)
    types = build.embed(
        "token_type_embeddings",
        rows=fields.integer("type_vocab_size"),
        width=hidden,
        kind=EmbeddingKind.TOKEN_TYPE,
    )
    both = build.add(tokens, types)
    places = build.embed(
        "position_embeddings", rows=positions, width=hidden, kind=EmbeddingKind.POSITION
    )
    normed = layer_norm(build, "LayerNorm", build.add(both, places))
    return build.build(build.dropout(normed, _hidden_dropout(fields)))


def _hidden_dropout(fields: Fields) -> float:
    return fields.probability("hidden_dropout_prob", default=0.1)


def _block(fields: Fields, hidden: int) -> Block:
    heads = Heads.split(fields, hidden, "num_attention_heads")
    dropout = _hidden_dropout(fields)
    build = BlockBuilder(width=hidden)
    build.prefix = "attention.self."
    query, key, value = heads.project(build, "x", bias=True, names=("query", "key", "value"))
    mixed = heads.attend(
        build,
        query,
        key,
        value,
        dropout=fields.probability("attention_probs_dropout_prob", default=0.1),
        softmax_fp32=False,
    )
    build.prefix = "attention.output."
    attended = attention_output(build, "dense", mixed, hidden, bias=True)
    middle = layer_norm(build, "LayerNorm", build.add(build.dropout(attended, dropout), "x"))
    build.end_attention()
    build.prefix = ""
    out = plain_mlp(
        build,
        middle,
        fields.integer("intermediate_size"),
        names=("intermediate.dense", "output.dense"),
        function=_function(fields),
    )
    summed = build.add(build.dropout(out, dropout), middle)
    return build.build(layer_norm(build, "output.LayerNorm", summed))


def _function(fields: Fields) -> str:
    return fields.function("hidden_act", default="gelu")


def _head(fields: Fields, vocab: int, hidden: int) -> Block:
    """The bias of the logits is `cls.predictions.bias`, which the decoder's is tied to."""
    build = BlockBuilder(width=hidden, prefix="cls.predictions.")
    transformed = build.linear("transform.dense", "x", hidden, bias=True)
    normed = layer_norm(
        build, "transform.LayerNorm", build.activation(transformed, _function(fields))
    )
    return build.build(
        build.linear("decoder", normed, vocab, bias=True, tied=True, bias_name="bias")
    )
