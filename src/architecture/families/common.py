"""Pieces that several families share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind, Linear, NormKind, Parallel, RotaryTable
from src.spec import Attention as AttentionChoice

ALL_IMPLEMENTATIONS = frozenset(AttentionChoice)
EAGER_ONLY = frozenset({AttentionChoice.EAGER})
EAGER_AND_SDPA = frozenset({AttentionChoice.EAGER, AttentionChoice.SDPA})
EAGER_AND_FLASH = frozenset({AttentionChoice.EAGER, AttentionChoice.FLASH})

SPLIT_NAMES = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Attention heads: how many, how wide."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        """All query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """All key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def read(
        cls,
        fields: Fields,
        hidden: int,
        *,
        absent_kv_heads: int | None = None,
        absent_head_dim: int | None = None,
    ) -> Heads:
        """From llama-like field names.

        Args:
            fields: of the config.
            hidden: the hidden size.
            absent_kv_heads: what the config class takes without `num_key_value_heads`; None, and a
                field that is null, stand for as many as heads.
            absent_head_dim: what it takes without `head_dim`; None, and a field that is null,
                stand for hidden_size / heads.

        Raises:
            UserError: key/value heads do not divide heads, or heads have no whole width.
        """
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.nullable("num_key_value_heads", absent_kv_heads) or num_heads
        fields.divisible("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        head_dim = fields.nullable("head_dim", absent_head_dim) or fields.divisible(
            "hidden_size", hidden, "num_attention_heads", num_heads
        )
        if head_dim % 2:
            raise fields.error("head_dim", head_dim, "an even number, as rotary positions need")
        return cls(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    @classmethod
    def split(cls, fields: Fields, hidden: int, *names: str) -> Heads:
        """`names` heads of equal width that together have the hidden size."""
        num_heads = fields.integer(*names)
        head_dim = fields.divisible("hidden_size", hidden, names[0], num_heads)
        return cls(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)

    def project(
        self,
        build: BlockBuilder,
        source: str,
        *,
        bias: bool,
        names: tuple[str, str, str] = SPLIT_NAMES,
    ) -> tuple[str, str, str]:
        """Query, key and value, each by a Linear of its own."""
        widths = (self.query_width, self.kv_width, self.kv_width)
        query, key, value = (
            self.project_one(build, name, source, width, bias=bias)
            for name, width in zip(names, widths, strict=True)
        )
        return query, key, value

    def project_one(
        self, build: BlockBuilder, name: str, source: str, width: int, *, bias: bool
    ) -> str:
        """A projection into attention, of one or all of query, key and value."""
        return build.linear(
            name, source, width, bias=bias, parallel=Parallel.COLUMN, is_attention=True
        )

    def project_fused(
        self, build: BlockBuilder, name: str, source: str, *, bias: bool
    ) -> tuple[str, str, str]:
        """Query, key and value as views of what one Linear gives."""
        width = self.query_width + 2 * self.kv_width
        fused = self.project_one(build, name, source, width, bias=bias)
        return (
            build.view(fused, self.query_width, name="query"),
            build.view(fused, self.kv_width, name="key"),
            build.view(fused, self.kv_width, name="value"),
        )

    def rotate(
        self,
        build: BlockBuilder,
        query: str,
        key: str,
        *,
        rotary_dim: int | None = None,
        table: RotaryTable = RotaryTable.HIDDEN,
        joined: bool = False,
    ) -> tuple[str, str]:
        """Rotary positions on the first `rotary_dim` elements of each head of query and key."""
        per_head = rotary_dim or self.head_dim
        return (
            build.rotary(query, rotary_width=self.num_heads * per_head, table=table, joined=joined),
            build.rotary(
                key, rotary_width=self.num_kv_heads * per_head, table=table, joined=joined
            ),
        )

    def rotated_elements(self, fields: Fields, *names: str, default: float) -> int:
        """Elements of each head that are rotated: that part of it, rounded down; an even number."""
        fraction = fields.rotary_fraction(*names, default=default)
        rotary_dim = int(self.head_dim * fraction)
        if rotary_dim < 2 or rotary_dim % 2:
            allowed = f"a part that is an even number of the {self.head_dim} elements of a head"
            raise fields.error(names[0], fraction, allowed)
        return rotary_dim

    def rotate_part(
        self, build: BlockBuilder, query: str, key: str, rotary_dim: int
    ) -> tuple[str, str]:
        """Rotated and unrotated elements put together by `cat`, also where none are unrotated."""
        return self.rotate(build, query, key, rotary_dim=rotary_dim, joined=True)

    def attend(
        self,
        build: BlockBuilder,
        query: str,
        key: str,
        value: str,
        *,
        dropout: float = 0.0,
        softmax_fp32: bool = True,
        eager_fp32: bool = False,
        softcap: bool = False,
        alibi: bool = False,
        explicit_mask: bool = False,
        sinks_name: str | None = None,
    ) -> str:
        """Softmax attention over these heads."""
        return build.attention(
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dropout=dropout,
            softmax_fp32=softmax_fp32,
            eager_fp32=eager_fp32,
            softcap=softcap,
            alibi=alibi,
            explicit_mask=explicit_mask,
            sinks_name=sinks_name,
        )


def token_stem(
    *,
    vocab: int,
    width: int,
    name: str = "model.embed_tokens",
    scaled: bool = False,
    dropout: float = 0.0,
) -> Block:
    """A token embedding, multiplied by a constant where `scaled`, and dropout."""
    build = BlockBuilder()
    tokens = build.embed(name, rows=vocab, width=width, kind=EmbeddingKind.TOKEN)
    if scaled:
        tokens = build.copy(tokens, name="scaled")
    return build.build(build.dropout(tokens, dropout))


def learned_stem(
    *, vocab: int, width: int, prefix: str, names: tuple[str, str], rows: int, dropout: float
) -> Block:
    """Token and position embeddings added, then dropout."""
    build = BlockBuilder(prefix=prefix)
    tokens = build.embed(names[0], rows=vocab, width=width, kind=EmbeddingKind.TOKEN)
    places = build.embed(names[1], rows=rows, width=width, kind=EmbeddingKind.POSITION)
    return build.build(build.dropout(build.add(tokens, places), dropout))


def rms_tail(hidden: int, *, kind: NormKind = NormKind.RMS, name: str = "model.norm") -> Block:
    """A final RMSNorm."""
    build = BlockBuilder(width=hidden)
    return build.build(build.norm(name, "x", kind=kind))


def layer_norm_tail(hidden: int, name: str) -> Block:
    """A final LayerNorm."""
    build = BlockBuilder(width=hidden)
    return build.build(layer_norm(build, name, "x"))


def lm_head(
    width: int, vocab: int, *, tied: bool, bias: bool = False, name: str = "lm_head"
) -> Block:
    """The Linear that makes the logits."""
    build = BlockBuilder(width=width)
    return build.build(build.linear(name, "x", vocab, bias=bias, tied=tied))


def rms_norm(build: BlockBuilder, name: str, source: str) -> str:
    """RMSNorm as llama computes it."""
    return build.norm(name, source, kind=NormKind.RMS)


def rms_norm_fp32(build: BlockBuilder, name: str, source: str) -> str:
    """RMSNorm that multiplies by its weight in fp32."""
    return build.norm(name, source, kind=NormKind.RMS_FP32)


def layer_norm(build: BlockBuilder, name: str, source: str, *, affine: bool = True) -> str:
    """`nn.LayerNorm`, with weight and bias unless not `affine`."""
    return build.norm(name, source, kind=NormKind.LAYER, weight=affine, bias=affine)


def attention_output(
    build: BlockBuilder, name: str, source: str, hidden: int, *, bias: bool
) -> str:
    """The projection from all heads back to the residual stream."""
    return build.linear(name, source, hidden, bias=bias, parallel=Parallel.ROW, is_attention=True)


def gathered(block: Block, *names: str) -> Block:
    """The block with those Linears gathering what they split, as transformers' plan for it says."""
    whole = {Parallel.COLUMN: Parallel.COLUMN_GATHERED, Parallel.ROW: Parallel.ROW_SCATTERED}
    ops = tuple(
        replace(op, parallel=whole[op.parallel])
        if isinstance(op, Linear) and op.name.rsplit(".", 1)[-1] in names
        else op
        for op in block.ops
    )
    return replace(block, ops=ops)


def plain_mlp(
    build: BlockBuilder,
    source: str,
    intermediate: int,
    *,
    names: tuple[str, str],
    function: str,
    bias: bool = True,
    inner_dropout: float = 0.0,
    flat: bool = False,
) -> str:
    """`down(dropout(act(up(x))))`."""
    hidden = build.width_of(source)
    up = build.linear(
        names[0], source, intermediate, bias=bias, parallel=Parallel.COLUMN, flat=flat
    )
    active = build.dropout(build.activation(up, function), inner_dropout)
    return build.linear(names[1], active, hidden, bias=bias, parallel=Parallel.ROW, flat=flat)


def gated_mlp(
    build: BlockBuilder, source: str, intermediate: int, *, function: str, bias: bool
) -> str:
    """`down(act(gate(x)) * up(x))`."""
    hidden = build.width_of(source)
    gate = build.linear("gate_proj", source, intermediate, bias=bias, parallel=Parallel.COLUMN)
    active = build.activation(gate, function)
    up = build.linear("up_proj", source, intermediate, bias=bias, parallel=Parallel.COLUMN)
    product = build.multiply(active, up)
    return build.linear("down_proj", product, hidden, bias=bias, parallel=Parallel.ROW)
