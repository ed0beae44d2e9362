"""The GPT-2 shape: learned positions, pre-norm LayerNorm, sequential residuals, plain MLP."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    EAGER_AND_FLASH,
    Heads,
    attention_output,
    layer_norm,
    layer_norm_tail,
    learned_stem,
    lm_head,
    plain_mlp,
)
from src.architecture.fields import Fields

HIDDEN = ("n_embd", "hidden_size")
LAYERS = ("n_layer", "num_hidden_layers")
HEADS = ("n_head", "num_attention_heads")
POSITIONS = ("n_positions", "max_position_embeddings")
TRANSFORMER = "transformer."


def gpt2(fields: Fields) -> Decoder:
    """GPT-2 (transformers `modeling_gpt2.py`).

    Defaults where absent: the three dropouts 0.1, `activation_function` gelu_new, `n_inner`
    4 x hidden, `tie_word_embeddings` true. Its eager attention computes the softmax in the dtype
    of the scores.
    """
    fields.refuse("add_cross_attention")
    hidden = fields.integer(*HIDDEN)
    heads = Heads.split(fields, hidden, *HEADS)
    block = _gpt2_block(fields, hidden, heads, function="gelu_new", softmax_fp32=False)
    return _decoder(fields, hidden, block)


def gpt_bigcode(fields: Fields) -> Decoder:
    """GPT-BigCode (transformers `modeling_gpt_bigcode.py`): GPT-2 with one key/value head.

    Defaults where absent: the three dropouts 0.1, `activation_function` gelu_pytorch_tanh,
    `n_inner` 4 x hidden, `multi_query` and `tie_word_embeddings` true. The model keeps a causal
    mask of its own.
    """
    fields.refuse("add_cross_attention")
    hidden = fields.integer(*HIDDEN)
    heads = Heads.split(fields, hidden, *HEADS)
    if fields.flag("multi_query", default=True):
        heads = Heads(num_heads=heads.num_heads, num_kv_heads=1, head_dim=heads.head_dim)
    block = _gpt2_block(fields, hidden, heads, function="gelu_pytorch_tanh", softmax_fp32=True)
    return _decoder(fields, hidden, block, buffer_bytes=fields.integer(*POSITIONS) ** 2)


def _decoder(fields: Fields, hidden: int, block: Block, *, buffer_bytes: int = 0) -> Decoder:
    vocab = fields.integer("vocab_size")
    positions = fields.integer(*POSITIONS)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=learned_stem(
            vocab=vocab,
            width=hidden,
            prefix=TRANSFORMER,
            names=("wte", "wpe"),
            rows=positions,
            dropout=fields.probability("embd_pdrop", default=0.1),
        ),
        blocks=(block,) * fields.layers(*LAYERS),
        blocks_path="transformer.h",
        tail=layer_norm_tail(hidden, "transformer.ln_f"),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=True)),
        positions=Positions.LEARNED,
        max_positions=positions,
        implementations=ALL_IMPLEMENTATIONS,
        buffer_bytes=buffer_bytes,
    )


def _gpt2_block(
    fields: Fields, hidden: int, heads: Heads, *, function: str, softmax_fp32: bool
) -> Block:
    dropout = fields.probability("resid_pdrop", default=0.1)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "ln_1", "x")
    build.prefix = "attn."
    query, key, value = heads.project_fused(build, "c_attn", normed, bias=True)
    mixed = heads.attend(
        build,
        query,
        key,
        value,
        dropout=fields.probability("attn_pdrop", default=0.1),
        softmax_fp32=softmax_fp32,
    )
    attended = attention_output(build, "c_proj", mixed, hidden, bias=True)
    build.prefix = ""
    attended = build.dropout(attended, dropout)
    build.end_attention()
    middle = build.add(attended, "x")
    normed = layer_norm(build, "ln_2", middle)
    build.prefix = "mlp."
    out = plain_mlp(
        build,
        normed,
        fields.optional_integer("n_inner") or 4 * hidden,
        names=("c_fc", "c_proj"),
        function=fields.function("activation_function", default=function),
    )
    return build.build(build.add(middle, build.dropout(out, dropout)))


def gpt_neo(fields: Fields) -> Decoder:
    """GPT-Neo (transformers `modeling_gpt_neo.py`); local and global layers have the same sizes.

    Defaults where absent: the dropouts 0, `activation_function` gelu_new, `intermediate_size`
    4 x hidden, `tie_word_embeddings` true. Every layer keeps a causal mask of its own. Only the
    eager path upcasts queries and keys to fp32.
    """
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    positions = fields.integer("max_position_embeddings")
    layers = fields.layers("num_layers", "num_hidden_layers")
    _check_attention_types(fields, layers)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=learned_stem(
            vocab=vocab,
            width=hidden,
            prefix=TRANSFORMER,
            names=("wte", "wpe"),
            rows=positions,
            dropout=fields.probability("embed_dropout"),
        ),
        blocks=(_gpt_neo_block(fields, hidden),) * layers,
        blocks_path="transformer.h",
        tail=layer_norm_tail(hidden, "transformer.ln_f"),
        head=lm_head(hidden, vocab, tied=fields.flag("tie_word_embeddings", default=True)),
        positions=Positions.LEARNED,
        max_positions=positions,
        implementations=EAGER_AND_FLASH,
        buffer_bytes=layers * positions**2,
    )


def _check_attention_types(fields: Fields, layers: int) -> None:
    """`[[["global", "local"], 12]]`: the kinds, repeated, make up all layers; the default."""
    value = fields.model.config.get("attention_types") or [[["global", "local"], 12]]
    allowed = f'pairs like [["global", "local"], 12] that make up all {layers} layers'
    total = 0
    for pair in value if isinstance(value, list | tuple) else [None]:
        match pair:
            case [[*kinds], int(count)] if all(kind in ("global", "local") for kind in kinds):
                total += len(kinds) * count
            case _:
                raise fields.error("attention_types", value, allowed)
    if total != layers:
        raise fields.error("attention_types", value, allowed)


def _gpt_neo_block(fields: Fields, hidden: int) -> Block:
    heads = Heads.split(fields, hidden, "num_heads", "num_attention_heads")
    dropout = fields.probability("resid_dropout")
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "ln_1", "x")
    build.prefix = "attn.attention."
    query, key, value = heads.project(build, normed, bias=False)
    weights_dropout = fields.probability("attention_dropout")
    mixed = heads.attend(build, query, key, value, dropout=weights_dropout, eager_fp32=True)
    attended = attention_output(build, "out_proj", mixed, hidden, bias=True)
    build.prefix = ""
    attended = build.dropout(attended, dropout)
    build.end_attention()
    middle = build.add(attended, "x")
    normed = layer_norm(build, "ln_2", middle)
    build.prefix = "mlp."
    out = plain_mlp(
        build,
        normed,
        fields.optional_integer("intermediate_size") or 4 * hidden,
        names=("c_fc", "c_proj"),
        function=fields.function("activation_function", default="gelu_new"),
    )
    return build.build(build.add(middle, build.dropout(out, dropout)))
