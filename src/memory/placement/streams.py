"""Which bytes lie in other streams' pools than that of the stream that computes."""

from __future__ import annotations

from dataclasses import dataclass

EVERYTHING = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """A stream's blocks are in a pool of its own, which keeps what it once needed.

    Attributes:
        gathered: bytes of whole weights in the computing stream's pool all the time.
        most_gathered: the most of them there at once; the rest are the all-gather's buffers.
        most_reduced: the most of communication buffers there at once.
        has_gradients: whether reduced gradients are there.
        sides: bytes of the other pools, each at its largest.
    """

    gathered: float = 0.0
    most_gathered: float = EVERYTHING
    most_reduced: float = EVERYTHING
    has_gradients: bool = True
    sides: float = 0.0

    @property
    def one_block(self) -> float:
        """Bytes of a block's whole weights, where they come and go."""
        return self.most_gathered - self.gathered if self.most_gathered < EVERYTHING else 0.0
