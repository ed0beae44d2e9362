"""GPT-NeoX, Phi and StableLM: partly rotated heads, attention and MLP often in parallel."""

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
from src.architecture.families.llama import (
    QueryKeyNorms,
    RotaryAttention,
    model_decoder,
    read_gated_mlp,
)
from src.architecture.families.residual import dropped, parallel_block, residual_block
from src.architecture.fields import Fields
from src.architecture.ops import NormKind

QK_NORMS = ("q_layernorm", "k_layernorm")


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
        blocks=(_gpt_neox_block(fields, hidden),) * fields.layers("num_hidden_layers"),
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
        function=fields.function("hidden_act", default="gelu"),
    )
    out = build.dropout(out, dropout)
    if parallel:
        return build.build(build.add(build.add(out, attended), "x"))
    return build.build(build.add(out, middle))


def _gpt_neox_attention(fields: Fields, build: BlockBuilder, hidden: int) -> str:
    heads = Heads.split(fields, hidden, "num_attention_heads")
    bias = fields.flag("attention_bias", default=True)
    rotary_dim = heads.rotated_elements(fields, "rotary_pct", default=0.25)
    normed = layer_norm(build, "input_layernorm", "x")
    build.prefix = "attention."
    query, key, value = heads.project_fused(build, "query_key_value", normed, bias=bias)
    query, key = heads.rotate_part(build, query, key, rotary_dim)
    mixed = heads.attend(build, query, key, value, dropout=fields.probability("attention_dropout"))
    out = attention_output(build, "dense", mixed, hidden, bias=bias)
    build.prefix = ""
    return out


def phi(fields: Fields) -> Decoder:
    """Phi-1.5 and Phi-2 (transformers `modeling_phi.py`): one norm, biases everywhere.

    Defaults where absent: the dropouts 0, `partial_rotary_factor` 0.5, `qk_layernorm` and
    `tie_word_embeddings` false, `hidden_act` gelu_new. The head has a bias, also where its weight
    is tied.
    """
    hidden = fields.integer("hidden_size")
    vocab = fields.integer("vocab_size")
    dropout = fields.probability("resid_pdrop")
    heads = Heads.read(fields, hidden)
    norms = QueryKeyNorms(kind=NormKind.LAYER, names=QK_NORMS, bias=True)
    attend = RotaryAttention(
        heads=heads,
        bias=True,
        output_bias=True,
        output_name="dense",
        dropout=fields.probability("attention_dropout"),
        rotary_dim=heads.rotated_elements(fields, "partial_rotary_factor", default=0.5),
        norms=norms if fields.flag("qk_layernorm", default=False) else None,
    )
    intermediate = fields.integer("intermediate_size")
    function = fields.function("hidden_act", default="gelu_new")

    def feed(build: BlockBuilder, source: str) -> str:
        build.prefix = "mlp."
        out = plain_mlp(build, source, intermediate, names=("fc1", "fc2"), function=function)
        build.prefix = ""
        return out

    block = parallel_block(
        hidden,
        dropped(attend, dropout),
        dropped(feed, dropout),
        norm=layer_norm,
        residual_first=False,
    )
    tied = fields.flag("tie_word_embeddings", default=False)
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.layers("num_hidden_layers"),
        stem=token_stem(vocab=vocab, width=hidden, dropout=fields.probability("embd_pdrop")),
        tail=layer_norm_tail(hidden, "model.final_layernorm"),
        head=lm_head(hidden, vocab, tied=tied, bias=True),
    )


def stablelm(fields: Fields) -> Decoder:
    """StableLM (transformers `modeling_stablelm.py`): llama with LayerNorm, partly rotated heads.

    Defaults where absent: 32 key/value heads, the dropouts 0, `partial_rotary_factor` 0.25,
    `use_qkv_bias`, `qk_layernorm`, `use_parallel_residual` and `tie_word_embeddings` false,
    `hidden_act` silu.
    """
    hidden = fields.integer("hidden_size")
    heads = Heads.read(fields, hidden, absent_kv_heads=32)
    norms = QueryKeyNorms(
        kind=NormKind.LAYER, names=("q_layernorm.norms", "k_layernorm.norms"), separate=True
    )
    attend = RotaryAttention(
        heads=heads,
        bias=fields.flag("use_qkv_bias", default=False),
        output_bias=False,
        dropout=fields.probability("attention_dropout"),
        rotary_dim=heads.rotated_elements(fields, "partial_rotary_factor", default=0.25),
        norms=norms if fields.flag("qk_layernorm", default=False) else None,
    )
    feed = dropped(read_gated_mlp(fields), fields.probability("hidden_dropout"))
    if fields.flag("use_parallel_residual", default=False):
        block = parallel_block(hidden, attend, feed, norm=layer_norm, residual_first=True)
    else:
        block = residual_block(hidden, attend, feed, norm=layer_norm)
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.layers("num_hidden_layers"),
        tail=layer_norm_tail(hidden, "model.norm"),
    )
