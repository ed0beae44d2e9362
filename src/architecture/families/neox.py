"""The GPT-NeoX shape: attention and MLP in parallel on two norms, partly rotated heads."""

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
    token_stem,
)
from src.architecture.fields import Fields


def gpt_neox(fields: Fields) -> Decoder:
    """GPT-NeoX and Pythia (transformers `modeling_gpt_neox.py`).

    Defaults where absent: `use_parallel_residual` and `attention_bias` true, `rotary_pct` 0.25, the
    dropouts 0, `hidden_act` gelu, `tie_word_embeddings` false.
    """
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=token_stem(
            vocab=vocab,
            width=hidden,
            name="gpt_neox.embed_in",
            dropout=fields.probability("hidden_dropout"),
        ),
        blocks=(_gpt_neox_block(fields, hidden),) * fields.integer("num_hidden_layers"),
        blocks_path="gpt_neox.layers",
        tail=layer_norm_tail(hidden, "gpt_neox.final_layer_norm"),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=False)),
        positions=Positions.ROTARY,
        max_positions=fields.integer("max_position_embeddings"),
        implementations=ALL_IMPLEMENTATIONS,
    )


def _gpt_neox_block(fields: Fields, hidden: int) -> Block:
    dropout = fields.probability("hidden_dropout")
    build = BlockBuilder(width=hidden)
    attended = build.dropout(_gpt_neox_attention(fields, build, hidden), dropout)
    parallel = fields.flag("use_parallel_residual", default=True)
    middle = "x" if parallel else build.add(attended, "x")
    normed = layer_norm(build, "post_attention_layernorm", middle)
    build.prefix = "mlp."
    out = plain_mlp(
        build,
        normed,
        fields.integer("intermediate_size"),
        names=("dense_h_to_4h", "dense_4h_to_h"),
        function=fields.text("hidden_act", default="gelu"),
    )
    out = build.dropout(out, dropout)
    if parallel:
        return build.build(build.add(build.add(out, attended), "x"))
    return build.build(build.add(out, middle))


def _gpt_neox_attention(fields: Fields, build: BlockBuilder, hidden: int) -> str:
    """Rotated and unrotated elements are put together by `cat`, also where none are unrotated."""
    heads = Heads.split(fields, hidden, "num_attention_heads")
    bias = fields.flag("attention_bias", default=True)
    rotary_dim = rotated_elements(fields, heads, "rotary_pct", default=0.25)
    normed = layer_norm(build, "input_layernorm", "x")
    build.prefix = "attention."
    query, key, value = heads.project_fused(build, "query_key_value", normed, bias=bias)
    query, key = heads.rotate(build, query, key, rotary_dim=rotary_dim)
    if rotary_dim == heads.head_dim:
        query, key = build.copy(query), build.copy(key)
    mixed = heads.attend(build, query, key, value, dropout=fields.probability("attention_dropout"))
    out = attention_output(build, "dense", mixed, hidden, bias=bias)
    build.prefix = ""
    return out


def rotated_elements(fields: Fields, heads: Heads, *names: str, default: float) -> int:
    """Elements of each head that are rotated: that part of it, rounded down, at least two."""
    fraction = fields.rotary_fraction(*names, default=default)
    rotary_dim = int(heads.head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        allowed = f"a part that is an even number of the {heads.head_dim} elements of a head"
        raise fields.error(names[0], fraction, allowed)
    return rotary_dim
