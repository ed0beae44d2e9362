"""The largest micro batch that fits, and what a verdict is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Protocol

from src.spec import Gpu, Step, Verdict
from src.units import Levels

LARGEST_MICRO_BATCH = 1 << 20
"""Where the search stops."""


class Answer(Protocol):
    """What any estimator says of one step; `src.memory.Estimate` tells what each part means."""

    @property
    def peak_bytes(self) -> Levels:
        """On the fullest GPU."""

    @property
    def upper_bytes(self) -> Levels:
        """Its upper bound."""

    @property
    def peak_instant(self) -> StrEnum:
        """The instant that sets the peak."""

    @property
    def ledger(self) -> Mapping[Any, Mapping[Any, int]]:
        """Instants x terms (or owners) in bytes, level `allocated`."""

    @property
    def host_bytes(self) -> int | None:
        """Host memory of one GPU's process for what is offloaded; None where that is not known."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know."""


class Estimator(Protocol):
    """Whatever answers for one step."""

    def __call__(self, step: Step) -> Answer:
        """The estimate of one step."""
        ...


def verdict(estimate: Answer, gpu: Gpu) -> Verdict:
    """`fits`: the upper bound is within the usable capacity; `tight`: only the estimate is."""
    if estimate.upper_bytes.device <= gpu.usable_bytes:
        return Verdict.FITS
    if estimate.peak_bytes.device <= gpu.usable_bytes:
        return Verdict.TIGHT
    return Verdict.OOM


def largest_that_fits(fits: Callable[[int], bool], limit: int) -> int:
    """The largest of 1 to `limit` that fits, by doubling and bisection; 0 if none does.

    What fits has to go on fitting for every smaller value.
    """
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_micro_batch(step: Step, estimator: Estimator) -> int:
    """The largest micro batch whose verdict is `fits`; 0 if none is.

    Peaks never fall as the micro batch grows, which is what the search needs.
    """

    def fits(micro_batch: int) -> bool:
        trial = with_micro_batch(step, micro_batch)
        return verdict(estimator(trial), step.gpu) is Verdict.FITS

    return largest_that_fits(fits, LARGEST_MICRO_BATCH)


def with_micro_batch(step: Step, micro_batch: int) -> Step:
    """The same step at another micro batch."""
    return Step(
        job=step.job,
        method=step.method,
        layout=step.layout,
        gpu=step.gpu,
        micro_batch=micro_batch,
    )
