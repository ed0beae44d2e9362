"""The llama shape: pre-norm RMSNorm, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families.common import (
    ALL_IMPLEMENTATIONS,
    Heads,
    attention_output,
    gated_mlp,
    lm_head,
    rms_tail,
    token_stem,
)
from src.architecture.fields import Fields
from src.architecture.ops import NormKind
from src.spec import Attention as AttentionChoice

WINDOW = 4096

Part = Callable[[BlockBuilder, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryAttention:
    """Attention with rotary positions and separate projections, under `self_attn`.

    Attributes:
        bias: of the query, key and value projections; `output_bias` of the output projection.
        dropout: probability on the attention weights.
        head_norm: kind of the norms `q_norm` and `k_norm` over each head; None: there are none.
        softcap: whether the scores are capped.
        sinks: whether a learned logit per head joins the softmax.
    """

    heads: Heads
    bias: bool
    output_bias: bool
    dropout: float
    head_norm: NormKind | None = None
    softcap: bool = False
    sinks: bool = False

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        hidden = build.width_of("x")
        heads = self.heads
        build.prefix = "self_attn."
        query, key, value = heads.project(build, source, bias=self.bias)
        if self.head_norm is not None:
            width = heads.head_dim
            query = build.norm("q_norm", query, kind=self.head_norm, features=width)
            key = build.norm("k_norm", key, kind=self.head_norm, features=width)
        query, key = heads.rotate(build, query, key)
        mixed = heads.attend(
            build,
            query,
            key,
            value,
            dropout=self.dropout,
            softcap=self.softcap,
            sinks_name="self_attn.sinks" if self.sinks else None,
        )
        out = attention_output(build, "o_proj", mixed, hidden, bias=self.output_bias)
        build.prefix = ""
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLP:
    """A gated MLP under `mlp`."""

    intermediate: int
    function: str
    bias: bool = False

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        build.prefix = "mlp."
        out = gated_mlp(build, source, self.intermediate, function=self.function, bias=self.bias)
        build.prefix = ""
        return out


def read_gated_mlp(fields: Fields, *, bias: bool = False) -> GatedMLP:
    """With `hidden_act` silu where absent."""
    return GatedMLP(
        intermediate=fields.integer("intermediate_size"),
        function=fields.text("hidden_act", default="silu"),
        bias=bias,
    )


def pre_norm_block(
    hidden: int, attend: Part, feed: Part, *, kind: NormKind = NormKind.RMS, scaled: bool = False
) -> Block:
    """Norm, attention, add, norm, MLP, add; what is added is multiplied first where `scaled`."""
    build = BlockBuilder(width=hidden)
    added = attend(build, build.norm("input_layernorm", "x", kind=kind))
    middle = build.add("x", build.copy(added) if scaled else added)
    added = feed(build, build.norm("post_attention_layernorm", middle, kind=kind))
    return build.build(build.add(middle, build.copy(added) if scaled else added))


def model_decoder(
    fields: Fields,
    *,
    hidden: int,
    blocks: tuple[Block, ...],
    tied_default: bool = False,
    stem: Block | None = None,
    tail: Block | None = None,
    head: Block | None = None,
    implementations: frozenset[AttentionChoice] = ALL_IMPLEMENTATIONS,
    windows: tuple[int | None, ...] = (),
) -> Decoder:
    """A rotary model whose parts lie under `model` and `lm_head`; llama's where none is given."""
    vocab = fields.integer("vocab_size")
    tied = fields.flag("tie_word_embeddings", default=tied_default)
    return Decoder(
        model_type=fields.model.model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        stem=stem or token_stem(vocab=vocab, width=hidden),
        blocks=blocks,
        blocks_path="model.layers",
        tail=tail or rms_tail(hidden),
        head=head or lm_head(hidden, vocab, tied=tied),
        positions=Positions.ROTARY,
        max_positions=fields.integer("max_position_embeddings"),
        implementations=implementations,
        windows=windows,
    )


def read_window(fields: Fields, *, default: int | None) -> int | None:
    """`sliding_window`: null stands for none, the default for a config without the field."""
    if "sliding_window" in fields.model.config:
        return fields.optional_integer("sliding_window")
    return default


def window_everywhere(
    fields: Fields, layers: int, *, default: int | None
) -> tuple[int | None, ...]:
    """`sliding_window` in every block, where there is one."""
    window = read_window(fields, default=default)
    return () if window is None else (window,) * layers


def llama(fields: Fields) -> Decoder:
    """Llama (transformers `modeling_llama.py`).

    Defaults where absent: `attention_bias`, `mlp_bias` and `tie_word_embeddings` false,
    `attention_dropout` 0, `hidden_act` silu.
    """
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias", default=False)
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden),
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
    )
    feed = read_gated_mlp(fields, bias=fields.flag("mlp_bias", default=False))
    block = pre_norm_block(hidden, attend, feed)
    return model_decoder(
        fields, hidden=hidden, blocks=(block,) * fields.integer("num_hidden_layers")
    )


def mistral(fields: Fields) -> Decoder:
    """Mistral (transformers `modeling_mistral.py`): llama without biases, with a window.

    Defaults where absent: `tie_word_embeddings` false, `attention_dropout` 0, `hidden_act` silu,
    `sliding_window` 4096; null stands for none.
    """
    hidden = fields.integer("hidden_size")
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden),
        bias=False,
        output_bias=False,
        dropout=fields.probability("attention_dropout"),
    )
    block = pre_norm_block(hidden, attend, read_gated_mlp(fields))
    layers = fields.integer("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        windows=window_everywhere(fields, layers, default=WINDOW),
    )
