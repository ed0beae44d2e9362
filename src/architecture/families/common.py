"""Pieces that several families share."""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block
from src.architecture.fields import Fields
from src.architecture.ops import EmbeddingKind, NormKind, Parallel
from src.spec import Attention as AttentionChoice

ALL_IMPLEMENTATIONS = frozenset(AttentionChoice)
EAGER_ONLY = frozenset({AttentionChoice.EAGER})
EAGER_AND_SDPA = frozenset({AttentionChoice.EAGER, AttentionChoice.SDPA})


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
    def read(cls, fields: Fields, hidden: int) -> Heads:
        """From llama-like field names; without `head_dim` it is hidden_size / heads."""
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
        fields.divisible("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        head_dim = fields.optional_integer("head_dim") or fields.divisible(
            "hidden_size", hidden, "num_attention_heads", num_heads
        )
        return cls(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    def attend(
        self, build: BlockBuilder, query: str, key: str, value: str, *, dropout: float = 0.0
    ) -> str:
        """Plain softmax attention over these heads."""
        return build.attention(
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dropout=dropout,
        )


def token_stem(*, vocab: int, width: int, name: str = "model.embed_tokens") -> Block:
    """A token embedding and nothing else."""
    build = BlockBuilder()
    return build.build(build.embed(name, rows=vocab, width=width, kind=EmbeddingKind.TOKEN))


def rms_tail(hidden: int, *, kind: NormKind = NormKind.RMS, name: str = "model.norm") -> Block:
    """A final RMSNorm."""
    build = BlockBuilder(width=hidden)
    return build.build(build.norm(name, "x", kind=kind))


def lm_head(width: int, vocab: int, *, tied: bool, bias: bool = False) -> Block:
    """The Linear that makes the logits."""
    build = BlockBuilder(width=width)
    return build.build(build.linear("lm_head", "x", vocab, bias=bias, tied=tied))


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
