"""The llama shape: pre-norm RMSNorm, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    Heads,
    gated_mlp,
    lm_head,
    rms_tail,
    token_stem,
)
from src.architecture.fields import Fields
from src.architecture.ops import NormKind, Parallel


def llama(fields: Fields) -> Decoder:
    """Llama and Mistral (transformers `modeling_llama.py`, `modeling_mistral.py`)."""
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    heads = Heads.read(fields, hidden)
    block = llama_block(
        hidden=hidden,
        heads=heads,
        intermediate=fields.integer("intermediate_size"),
        function=fields.text("hidden_act", default="silu"),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        dropout=fields.probability("attention_dropout"),
    )
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=token_stem(vocab=vocab, width=hidden),
        blocks=(block,) * fields.integer("num_hidden_layers"),
        blocks_path="model.layers",
        tail=rms_tail(hidden),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=False)),
        positions=Positions.ROTARY,
        max_positions=fields.integer("max_position_embeddings"),
        implementations=ALL_IMPLEMENTATIONS,
    )


def llama_block(
    *,
    hidden: int,
    heads: Heads,
    intermediate: int,
    function: str,
    attention_bias: bool,
    mlp_bias: bool,
    dropout: float,
) -> Block:
    """One block: norm, attention, add, norm, gated MLP, add."""
    build = BlockBuilder(width=hidden)
    normed = build.norm("input_layernorm", "x", kind=NormKind.RMS)
    build.prefix = "self_attn."
    query, key, value = (
        build.linear(
            name,
            normed,
            width,
            bias=attention_bias,
            parallel=Parallel.COLUMN,
            is_attention=True,
        )
        for name, width in (
            ("q_proj", heads.query_width),
            ("k_proj", heads.kv_width),
            ("v_proj", heads.kv_width),
        )
    )
    mixed = heads.attend(build, build.rotary(query), build.rotary(key), value, dropout=dropout)
    attended = build.linear(
        "o_proj", mixed, hidden, bias=attention_bias, parallel=Parallel.ROW, is_attention=True
    )
    build.prefix = ""
    middle = build.add("x", attended)
    normed = build.norm("post_attention_layernorm", middle, kind=NormKind.RMS)
    build.prefix = "mlp."
    out = gated_mlp(build, normed, intermediate, function=function, bias=mlp_bias)
    return build.build(build.add(middle, out))
