"""Bytes as a function of micro batch and sequence, and the shape at which they are evaluated.

Letters: B micro batch, S sequence length, S128 the sequence rounded up to 128, C the tokens of one
chunk of a fused loss, B2 the micro batch where it is 2 or more, else 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

FLOAT_BYTES = 4
"""Bytes of an fp32 element."""


class Size(NamedTuple):
    """Bytes, by what they grow with.

    `fixed + per_token*B*S + per_score*B*S*S + per_padded*B*S128 + per_position*S + per_row*C +
    per_sliced*B2*S`: a slice of the tokens of a lone sequence is contiguous and needs no copy.
    """

    fixed: float = 0
    per_token: float = 0
    per_score: float = 0
    per_padded: float = 0
    per_position: float = 0
    per_row: float = 0
    per_sliced: float = 0

    def plus(self, other: Size) -> Size:
        """The sum, coefficient by coefficient."""
        return Size(*(left + right for left, right in zip(self, other, strict=True)))

    def times(self, factor: float) -> Size:
        """Every coefficient times `factor`."""
        return Size(*(coefficient * factor for coefficient in self))

    def at(self, shape: Shape) -> Any:
        """Bytes at a shape; an array where the shape holds arrays."""
        return (
            self.fixed
            + self.per_token * shape.tokens
            + self.per_score * shape.scores
            + self.per_padded * shape.padded
            + self.per_position * shape.positions
            + self.per_row * shape.rows
            + self.per_sliced * shape.sliced
        )

    def at_least(self, other: Size) -> bool:
        """Whether no coefficient is smaller than the other's: then it is larger at every shape."""
        return all(left >= right for left, right in zip(self, other, strict=True))


ZERO = Size()


class Shape(NamedTuple):
    """The products of micro batch and sequence that sizes are linear in; ints or arrays."""

    tokens: Any
    scores: Any
    padded: Any
    positions: Any
    rows: Any
    sliced: Any

    @classmethod
    def of(cls, micro_batch: Any, seq_len: Any, *, num_chunks: int = 1) -> Shape:
        """From micro batch B, sequence length S and the chunks that a fused loss aims at."""
        tokens = micro_batch * seq_len
        return cls(
            tokens=tokens,
            scores=micro_batch * seq_len * seq_len,
            padded=micro_batch * ((seq_len + 127) // 128 * 128),
            positions=seq_len,
            rows=_chunk_rows(tokens, num_chunks),
            sliced=tokens * (micro_batch > 1),
        )

    def repeated(self, factor: float) -> Shape:
        """A lone sequence's shape so many times over; they need not be whole ones."""
        return Shape(
            tokens=self.tokens * factor,
            scores=self.scores * factor,
            padded=self.padded * factor,
            positions=self.positions,
            rows=self.rows * factor,
            sliced=self.tokens * factor * (factor > 1),
        )


def _chunk_rows(tokens: Any, num_chunks: int) -> Any:
    """The tokens of a chunk, rounded up to a power of two, but not beyond all tokens.

    Liger-Kernel, `fused_linear_cross_entropy.py`: `min(next_power_of_2(cdiv(T, chunks)), T)`.
    """
    ones = -(-tokens // num_chunks) - 1
    for shift in (1, 2, 4, 8, 16, 32):
        ones = ones | ones >> shift
    rows = ones + 1
    return rows - (rows - tokens) * (rows > tokens)


def fixed(num_bytes: float) -> Size:
    """Bytes that depend on neither batch nor sequence."""
    return Size(fixed=num_bytes)


def per_token(num_bytes: float) -> Size:
    """Bytes per token of the micro batch."""
    return Size(per_token=num_bytes)


def per_score(num_bytes: float) -> Size:
    """Bytes per pair of positions of each sequence."""
    return Size(per_score=num_bytes)


class Sized(Protocol):
    """Anything that has a size."""

    @property
    def size(self) -> Size:
        """Its bytes."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


def undominated(items: Iterable[SizedT]) -> list[SizedT]:
    """Those items that no other one is at least as large as at every shape, largest first."""
    kept: list[SizedT] = []
    for item in sorted(items, key=lambda item: item.size, reverse=True):
        if not any(other.size.at_least(item.size) for other in kept):
            kept.append(item)
    return kept


def total(sizes: Iterable[Size]) -> Size:
    """The sum of any number of sizes."""
    result = ZERO
    for size in sizes:
        result = result.plus(size)
    return result
