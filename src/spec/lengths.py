"""How long the sequences of a data set are, and how long the longest of a micro batch is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

MOST_POINTS = 128
"""Points at which a distribution is evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens; a micro batch is padded to its longest sequence.

    Attributes:
        counts: (length, number of sequences), shortest first.
    """

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """From the length of every sequence, each 1 or more; at least one of them."""
        counts = Counter(lengths)
        assert counts, "no sequence"
        assert min(counts) > 0, "a sequence has a token"
        return cls(counts=tuple(sorted(counts.items())))

    @property
    def num_sequences(self) -> int:
        """Sequences of the data set."""
        return sum(count for _, count in self.counts)

    @property
    def longest(self) -> int:
        """The longest sequence: the worst case of any micro batch."""
        return self.counts[-1][0]

    @property
    def mean(self) -> float:
        """Tokens per sequence, without padding."""
        return sum(length * count for length, count in self.counts) / self.num_sequences

    def padded(self, micro_batch: int) -> list[tuple[int, float]]:
        """(length, probability) of the longest of `micro_batch` sequences drawn at random.

        `P(longest <= l) = F(l)^B`, F the share of sequences up to l, drawn with replacement. Beyond
        `MOST_POINTS` lengths, neighbours are taken together at the longer one.
        """
        points: list[tuple[int, float]] = []
        step, below, reached, seen = 1 / MOST_POINTS, 0.0, 0.0, 0
        total = self.num_sequences
        for length, count in self.counts:
            seen += count
            reached = (seen / total) ** micro_batch
            is_last = length == self.longest
            if reached - below >= step or is_last or len(self.counts) <= MOST_POINTS:
                points.append((length, reached - below))
                below = reached
        return points

    def mean_padded(self, micro_batch: int) -> float:
        """Expected length of a padded micro batch."""
        return sum(length * probability for length, probability in self.padded(micro_batch))
