"""The llama shape: pre-norm RMSNorm, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

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
from src.architecture.families.residual import residual_block
from src.architecture.fields import Fields
from src.architecture.ops import NormKind, RotaryTable
from src.spec import Attention as AttentionChoice

WINDOW = 4096
KV_HEADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyNorms:
    """Norms on queries and keys.

    Attributes:
        kind: of both.
        names: of the queries' and the keys'.
        bias: whether they have one.
        at_once: whether each norm follows its projection, before the next projection.
        whole: whether they go over all heads together, not over each head.
        separate: whether each head has a module of its own; then the heads are put together again.
    """

    kind: NormKind
    names: tuple[str, str] = ("q_norm", "k_norm")
    bias: bool = False
    at_once: bool = False
    whole: bool = False
    separate: bool = False

    def query(self, build: BlockBuilder, source: str, head_dim: int) -> str:
        """The normed query."""
        return self._norm(build, self.names[0], source, head_dim)

    def key(self, build: BlockBuilder, source: str, head_dim: int) -> str:
        """The normed key."""
        return self._norm(build, self.names[1], source, head_dim)

    def _norm(self, build: BlockBuilder, name: str, source: str, head_dim: int) -> str:
        out = build.norm(
            name,
            source,
            kind=self.kind,
            features=None if self.whole else head_dim,
            bias=self.bias,
            separate=self.separate,
        )
        return build.copy(out) if self.separate else out


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryAttention:
    """Attention with rotary positions and separate projections, under `self_attn`.

    Attributes:
        bias: of the query, key and value projections; `output_bias` of the output projection.
        dropout: probability on the attention weights.
        output_name: of the output projection.
        rotary_dim: elements of each head that are rotated and then put together with the rest;
            None: all are, in place of the head.
        rotated_fp32: whether the rotation is in fp32; queries and keys then return to their dtype.
        norms: norms on queries and keys, before the rotation.
        softcap: whether the scores are capped.
        sinks: whether a learned logit per head joins the softmax, which then is not in fp32.
    """

    heads: Heads
    bias: bool
    output_bias: bool
    dropout: float
    output_name: str = "o_proj"
    rotary_dim: int | None = None
    rotated_fp32: bool = False
    norms: QueryKeyNorms | None = None
    softcap: bool = False
    sinks: bool = False

    def __call__(self, build: BlockBuilder, source: str) -> str:
        """Write it down; gives the name of what it adds to the residual stream."""
        hidden = build.width_of("x")
        build.prefix = "self_attn."
        query, key, value = self._project(build, source)
        query, key = self._rotate(build, query, key)
        mixed = self.heads.attend(
            build,
            query,
            key,
            value,
            dropout=self.dropout,
            softmax_fp32=not self.sinks,
            softcap=self.softcap,
            sinks_name="self_attn.sinks" if self.sinks else None,
        )
        out = attention_output(build, self.output_name, mixed, hidden, bias=self.output_bias)
        build.prefix = ""
        return out

    def _project(self, build: BlockBuilder, source: str) -> tuple[str, str, str]:
        heads, norms, bias = self.heads, self.norms, self.bias
        if norms is None or not norms.at_once:
            query, key, value = heads.project(build, source, bias=bias)
            if norms is not None:
                query = norms.query(build, query, heads.head_dim)
                key = norms.key(build, key, heads.head_dim)
            return query, key, value
        query = heads.project_one(build, "q_proj", source, heads.query_width, bias=bias)
        query = norms.query(build, query, heads.head_dim)
        key = heads.project_one(build, "k_proj", source, heads.kv_width, bias=bias)
        key = norms.key(build, key, heads.head_dim)
        return query, key, heads.project_one(build, "v_proj", source, heads.kv_width, bias=bias)

    def _rotate(self, build: BlockBuilder, query: str, key: str) -> tuple[str, str]:
        if self.rotary_dim is not None:
            return self.heads.rotate_part(build, query, key, self.rotary_dim)
        if not self.rotated_fp32:
            return self.heads.rotate(build, query, key)
        rotated = self.heads.rotate(build, query, key, table=RotaryTable.FP32)
        return build.copy(rotated[0], like=query), build.copy(rotated[1], like=key)


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
        function=fields.function("hidden_act", default="silu"),
        bias=bias,
    )


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


def window_everywhere(
    fields: Fields, layers: int, *, default: int | None
) -> tuple[int | None, ...]:
    """`sliding_window` in every block, where there is one."""
    window = fields.nullable("sliding_window", default)
    return () if window is None else (window,) * layers


def llama(fields: Fields) -> Decoder:
    """Llama (transformers `modeling_llama.py`).

    Defaults where absent: `attention_bias`, `mlp_bias` and `tie_word_embeddings` false,
    `attention_dropout` 0, `hidden_act` silu.
    """
    hidden = fields.integer("hidden_size")
    heads = Heads.read(fields, hidden)
    fields.divisible("hidden_size", hidden, "num_attention_heads", heads.num_heads)
    bias = fields.flag("attention_bias", default=False)
    attend = RotaryAttention(
        heads=heads,
        bias=bias,
        output_bias=bias,
        dropout=fields.probability("attention_dropout"),
    )
    feed = read_gated_mlp(fields, bias=fields.flag("mlp_bias", default=False))
    block = residual_block(hidden, attend, feed)
    return model_decoder(
        fields, hidden=hidden, blocks=(block,) * fields.layers("num_hidden_layers")
    )


def mistral(fields: Fields) -> Decoder:
    """Mistral (transformers `modeling_mistral.py`): llama without biases, with a window.

    Defaults where absent: 8 key/value heads, `tie_word_embeddings` false, `attention_dropout` 0,
    `hidden_act` silu, `sliding_window` 4096; null stands for none.
    """
    hidden = fields.integer("hidden_size")
    attend = RotaryAttention(
        heads=Heads.read(fields, hidden, absent_kv_heads=KV_HEADS),
        bias=False,
        output_bias=False,
        dropout=fields.probability("attention_dropout"),
    )
    block = residual_block(hidden, attend, read_gated_mlp(fields))
    layers = fields.layers("num_hidden_layers")
    return model_decoder(
        fields,
        hidden=hidden,
        blocks=(block,) * layers,
        windows=window_everywhere(fields, layers, default=WINDOW),
    )
