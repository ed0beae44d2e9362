"""Gemma, Gemma 2 and Gemma 3: scaled embeddings, fp32 norms, capped scores or normed queries."""

from __future__ import annotations

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder
from src.architecture.families.common import (
    Heads,
    rms_tail,
)
from src.architecture.families.llama import (
    GatedMLP,
    RotaryAttention,
    model_decoder,
    pre_norm_block,
)
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind, NormKind

HEAD_DIM = 256
TANH_GELU = "gelu_pytorch_tanh"


def gemma(fields: Fields) -> Decoder:
    """Gemma (transformers `modeling_gemma.py`).

    Defaults where absent: `head_dim` 256, `attention_bias` false, `attention_dropout` 0,
    `tie_word_embeddings` true, `hidden_act` gelu_pytorch_tanh, which "gelu" also stands for.
    """
    hidden = fields.integer("hidden_size")
    function = fields.text("hidden_act", default=TANH_GELU)
    feed = GatedMLP(
        intermediate=fields.integer("intermediate_size"),
        function=TANH_GELU if function == "gelu" else function,
    )
    attend = _attention(fields, hidden)
    block = pre_norm_block(hidden, attend, feed, kind=NormKind.RMS_FP32)
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * fields.integer("num_hidden_layers"),
        tied_default=True,
        stem=scaled_stem(fields, hidden),
        tail=rms_tail(hidden, kind=NormKind.RMS_FP32),
    )


def scaled_stem(fields: Fields, hidden: int) -> Block:
    """A token embedding, multiplied by a constant."""
    build = BlockBuilder()
    vocab = fields.integer("vocab_size")
    tokens = build.embed("model.embed_tokens", rows=vocab, width=hidden, kind=EmbeddingKind.TOKEN)
    return build.build(build.copy(tokens, name="scaled"))


def _attention(
    fields: Fields, hidden: int, *, head_norm: NormKind | None = None, softcap: bool = False
) -> RotaryAttention:
    bias = fields.flag("attention_bias", default=False)
    return RotaryAttention(
        heads=Heads.read(fields, hidden, default_head_dim=HEAD_DIM),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
        head_norm=head_norm,
        softcap=softcap,
    )
