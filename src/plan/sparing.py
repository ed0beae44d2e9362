"""The largest micro batch by an estimator that takes seconds: a guess, and few checks of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from src.errors import UserError
from src.memory.levels import upper_room
from src.plan.search import (
    LARGEST_MICRO_BATCH,
    Answer,
    Estimator,
    largest_micro_batch,
    verdict,
    with_micro_batch,
)
from src.spec import Step, Verdict

MOST_TRIALS = 4
"""Estimates that one row's search may take where the largest micro batch is what is asked for."""

MOST_TRIALS_BESIDE = 2
"""The same beside the estimate of a micro batch that is asked for, which is the answer then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """What a search found.

    Attributes:
        micro_batch: the largest that was seen to fit; 0 where not even 1 does.
        unfit: the smallest that was seen not to fit; None where none was.
    """

    micro_batch: int
    unfit: int | None

    @property
    def is_exact(self) -> bool:
        """Whether the next larger one was seen not to fit."""
        return self.unfit == self.micro_batch + 1


def largest_sparingly(
    step: Step, estimator: Estimator, guide: Estimator | None, *, asked: int | None = None
) -> Largest:
    """The largest micro batch whose verdict is `fits`, in a few estimates.

    Args:
        step: the step; its micro batch is not looked at.
        estimator: who decides.
        guide: a fast estimator that gives the first guess and the bytes of one sequence more.
        asked: a micro batch whose estimate is needed anyway.
    """
    search = _Search(step, estimator, guide)
    if asked is not None:
        search.try_(asked)
    for left in reversed(range(MOST_TRIALS if asked is None else MOST_TRIALS_BESIDE)):
        if search.is_done:
            break
        search.try_(1 if left == 0 and search.low == 0 else search.propose())
    return search.result()


class _Search:
    """A bracket: `low` fits, `high` does not (None: not known to)."""

    def __init__(self, step: Step, estimator: Estimator, guide: Estimator | None) -> None:
        self.low = 0
        self.high: int | None = None
        self._step, self._estimator = step, estimator
        self._guess, self._slope = _guided(step, guide)
        self._known: dict[int, Answer] = {}
        self._failures = 0

    @property
    def is_done(self) -> bool:
        return self.high == self.low + 1 or self.low == LARGEST_MICRO_BATCH

    def result(self) -> Largest:
        return Largest(micro_batch=self.low, unfit=self.high)

    def try_(self, micro_batch: int) -> None:
        assert self.low < micro_batch
        assert self.high is None or micro_batch < self.high
        trial = with_micro_batch(self._step, micro_batch)
        self._known[micro_batch] = self._estimator(trial)
        if verdict(self._known[micro_batch], trial.gpu) is Verdict.FITS:
            self.low, self._failures = micro_batch, 0
        else:
            self.high, self._failures = micro_batch, self._failures + 1

    def propose(self) -> int:
        """A micro batch strictly within the bracket."""
        ceiling = LARGEST_MICRO_BATCH if self.high is None else self.high - 1
        if self._guess not in self._known and self.low < self._guess <= ceiling:
            return self._guess
        if self.high is None:
            found = self._by_room()
        elif self._failures:
            found = self._by_excess(self.high)
        else:
            found = (self.low + self.high) // 2
        return min(max(found, self.low + 1), ceiling)

    def _by_room(self) -> int:
        """Where a line through the allocated bytes of what fits meets the room that there is."""
        peak, upper = self._known[self.low].peak_bytes, self._known[self.low].upper_bytes
        outside = max(peak.device - peak.reserved, upper.device - upper.reserved)
        room = upper_room(outside=outside, capacity=self._step.gpu.usable_bytes)
        slope = self._slope_at(self.low)
        if slope <= 0:
            return 2 * self.low
        return self.low + int((room - upper.allocated) // slope)

    def _by_excess(self, unfit: int) -> int:
        """As many sequences fewer as what is too much comes to; twice that if it fails again."""
        excess = self._known[unfit].upper_bytes.device - self._step.gpu.usable_bytes
        slope = self._slope_at(unfit)
        if slope <= 0:
            return unfit // 2
        return unfit - (math.ceil(excess / slope) << (self._failures - 1))

    def _slope_at(self, micro_batch: int) -> float:
        """Allocated bytes of one sequence more; 0 where that is not known."""
        others = [known for known in self._known if known != micro_batch]
        if not others:
            return self._slope
        other = min(others, key=lambda known: abs(known - micro_batch))
        size, other_size = (
            self._known[known].upper_bytes.allocated for known in (micro_batch, other)
        )
        return (size - other_size) / (micro_batch - other)


def _guided(step: Step, guide: Estimator | None) -> tuple[int, float]:
    """The first guess, and bytes per sequence around it (0: not known)."""
    if guide is None:
        return 1, 0.0
    try:
        guess = max(1, largest_micro_batch(step, guide))
        size, twice = (
            guide(with_micro_batch(step, micro_batch)).upper_bytes.allocated
            for micro_batch in (guess, 2 * guess)
        )
    except UserError:
        return 1, 0.0
    return guess, (twice - size) / guess
