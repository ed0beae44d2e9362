"""The GPT-J shape: one norm, attention and MLP in parallel, rotary positions on part of a head."""

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
from src.architecture.families.gpt import HEADS, HIDDEN, LAYERS, POSITIONS
from src.architecture.fields import Fields
from src.architecture.ops import RotaryTable

FP32_BYTES = 4
CODEGEN_SHARDS = 4


def gptj(fields: Fields) -> Decoder:
    """GPT-J (transformers `modeling_gptj.py`).

    Defaults where absent: the dropouts 0, `activation_function` gelu_new, `n_inner` 4 x hidden,
    `rotary_dim` 64, `tie_word_embeddings` false. The head has a bias, also where its weight is
    tied. Only the eager path upcasts queries and keys to fp32.
    """
    hidden = fields.integer(*HIDDEN)
    heads = Heads.split(fields, hidden, *HEADS)
    rotary_dim = _rotary_dim(fields, heads)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "ln_1", "x")
    build.prefix = "attn."
    query, key, value = heads.project(build, normed, bias=False)
    query, key = heads.rotate(build, query, key, rotary_dim=rotary_dim)
    dropout = fields.probability("attn_pdrop")
    mixed = heads.attend(build, query, key, value, dropout=dropout, eager_fp32=True)
    return _decoder(fields, hidden, _finish_block(fields, build, normed, mixed), rotary_dim)


def codegen(fields: Fields) -> Decoder:
    """CodeGen (transformers `modeling_codegen.py`): GPT-J with one projection for q, v and k.

    The projection is interleaved over four shards, so that each part is copied out of it unless
    there are four heads. Positions are rotated in fp32, and queries and keys return to the value's
    dtype. Defaults as for GPT-J.
    """
    hidden = fields.integer(*HIDDEN)
    heads = Heads.split(fields, hidden, *HEADS)
    fields.divisible("hidden_size", hidden, "shards", CODEGEN_SHARDS)
    rotary_dim = _rotary_dim(fields, heads)
    build = BlockBuilder(width=hidden)
    normed = layer_norm(build, "ln_1", "x")
    build.prefix = "attn."
    parts = heads.project_fused(build, "qkv_proj", normed, bias=False)
    if heads.num_heads != CODEGEN_SHARDS:
        query, key, value = (build.copy(part) for part in parts)
    else:
        query, key, value = parts
    rotated = heads.rotate(build, query, key, rotary_dim=rotary_dim, table=RotaryTable.FP32)
    query, key = (build.copy(one, like=value) for one in rotated)
    dropout = fields.probability("attn_pdrop")
    mixed = heads.attend(build, query, key, value, dropout=dropout, eager_fp32=True)
    return _decoder(fields, hidden, _finish_block(fields, build, normed, mixed), rotary_dim)


def _rotary_dim(fields: Fields, heads: Heads) -> int:
    rotary_dim = fields.optional_integer("rotary_dim") or 64
    if rotary_dim > heads.head_dim or rotary_dim % 2:
        allowed = f"even and at most the width of a head, {heads.head_dim}"
        raise fields.error("rotary_dim", rotary_dim, allowed)
    return rotary_dim


def _finish_block(fields: Fields, build: BlockBuilder, normed: str, mixed: str) -> Block:
    """Output projection, MLP on the same normed input, then all three summed."""
    hidden = build.width_of("x")
    dropout = fields.probability("resid_pdrop")
    attended = build.dropout(
        attention_output(build, "out_proj", mixed, hidden, bias=False), dropout
    )
    build.end_attention()
    build.prefix = "mlp."
    out = plain_mlp(
        build,
        normed,
        fields.optional_integer("n_inner") or 4 * hidden,
        names=("fc_in", "fc_out"),
        function=fields.function("activation_function", default="gelu_new"),
    )
    both = build.add(attended, build.dropout(out, dropout))
    return build.build(build.add(both, "x"))


def _decoder(fields: Fields, hidden: int, block: Block, rotary_dim: int) -> Decoder:
    vocab = fields.integer("vocab_size")
    positions = fields.integer(*POSITIONS)
    tied = fields.flag("tie_word_embeddings", default=False)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=token_stem(
            vocab=vocab,
            width=hidden,
            name="transformer.wte",
            dropout=fields.probability("embd_pdrop"),
        ),
        blocks=(block,) * fields.layers(*LAYERS),
        blocks_path="transformer.h",
        tail=layer_norm_tail(hidden, "transformer.ln_f"),
        head=lm_head(hidden, vocab, tied=tied, bias=True),
        positions=Positions.ROTARY,
        max_positions=positions,
        implementations=ALL_IMPLEMENTATIONS,
        buffer_bytes=positions * rotary_dim * FP32_BYTES,
    )
