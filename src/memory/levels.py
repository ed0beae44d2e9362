"""From `allocated` to `reserved` and `device`, and the upper bound of each.

FIRST MODELS: no fit to measured runs has replaced these figures yet; reports carry a wide upper
bound because of them. `reserved`: what the pools hold (`src.memory.pools`), as long as the
allocator need not give anything back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from src.memory.outside import outside_bytes
from src.spec import Gpu, Layout
from src.units import Levels

HOLES = 0.025
"""Share of a stream's segments that lies free between live blocks, or at a segment's end: what
replays of the matrix of docs/accuracy.md hold beyond `src.memory.segments`, in the median."""

SLACK_AT_CAPACITY = 0.015
"""What fragmentation still costs once the cache has been given back."""

UPPER_SLACK_AT_CAPACITY = 0.05
"""The same in the upper bound: replays of nearly full cards through the simulated allocator fail
where single blocks of the logits take a quarter of the card."""

UPPER_ALLOCATED = 0.05
"""Margin of the upper bound on allocated bytes, until it is calibrated."""

UPPER_OUTSIDE = 0.25
"""Margin of the upper bound on context and NCCL bytes, until it is calibrated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelModel:
    """The first models for one GPU model and layout.

    Attributes:
        capacity: usable bytes of the GPU.
        outside: bytes that the process holds outside the allocator: CUDA context and NCCL.
    """

    capacity: int
    outside: int

    def is_full(self, allocated: int) -> bool:
        """Whether the allocator gives its whole cache back: then pools do not matter."""
        return allocated * (1 + SLACK_AT_CAPACITY) >= self.capacity - self.outside

    def estimate(self, allocated: int, *, pooled: float | None = None) -> Levels:
        """All levels for an allocated peak in bytes.

        Args:
            allocated: the peak.
            pooled: bytes of all pools; None: of one stream's whose blocks all fit.
        """
        least = allocated * (1 + SLACK_AT_CAPACITY)
        freely = max(least, pooled or allocated * (1 + HOLES))
        reserved = round(min(freely, max(least, self.capacity - self.outside)))
        return Levels(allocated=allocated, reserved=reserved, device=reserved + self.outside)

    def device_at(self, allocated: Any) -> Any:
        """Device bytes for allocated peaks whose blocks all fit; they may be a numpy array."""
        least = allocated * (1 + SLACK_AT_CAPACITY)
        room = _larger(least, self.capacity - self.outside)
        reserved = -_larger(-allocated * (1 + HOLES), -room)
        return reserved + self.outside

    def surely_fits(self, allocated: Any, fragmented: Any) -> Any:
        """Whether steps are sure to fit.

        Args:
            allocated: their peaks in bytes; may be a numpy array.
            fragmented: as in `upper`; alike.
        """
        outside = upper_outside(self.outside)
        room = upper_room(outside=outside, capacity=self.capacity)
        fits = allocated * (1 + UPPER_ALLOCATED) <= room
        return fits & (fragmented * (1 + UPPER_ALLOCATED) + outside <= self.capacity)

    def upper(self, allocated: int, *, pooled: float | None = None, fragmented: int = 0) -> Levels:
        """The upper bound of all levels; never below the estimate.

        Args:
            allocated: the estimated peak in bytes.
            pooled: as in `estimate`.
            fragmented: allocated bytes and stranded blocks of another moment, where they are more.
        """
        estimate = self.estimate(allocated, pooled=pooled)
        freely = pooled or allocated * (1 + HOLES)
        bound = upper_levels(estimate, freely=freely, outside=self.outside, capacity=self.capacity)
        stranded = round(fragmented * (1 + UPPER_ALLOCATED))
        return Levels(
            allocated=bound.allocated,
            reserved=max(bound.reserved, stranded),
            device=max(bound.device, stranded + upper_outside(self.outside)),
        )


def _larger(left: Any, right: Any) -> Any:
    """Elementwise maximum without importing numpy."""
    return left + (right - left) * (right > left)


def upper_outside(outside: int) -> int:
    """The upper bound of context and NCCL bytes."""
    return round(outside * (1 + UPPER_OUTSIDE))


def upper_levels(estimate: Levels, *, freely: float, outside: int, capacity: int) -> Levels:
    """The upper bound of an estimate at every level; never below it.

    The cache is given back before the card is full, down to what fragmentation costs. The bound
    never assumes less than that, so that whether it fits is a matter of allocated bytes alone,
    which never fall as the batch grows.

    Args:
        estimate: what is estimated.
        freely: estimated reserved bytes where nothing need be given back.
        outside: estimated bytes outside the allocator.
        capacity: usable bytes of the GPU.
    """
    outside = upper_outside(outside)
    allocated = round(estimate.allocated * (1 + UPPER_ALLOCATED))
    least = allocated * (1 + UPPER_SLACK_AT_CAPACITY)
    freely = max(least, freely * (1 + UPPER_ALLOCATED))
    reserved = round(min(freely, max(least, capacity - outside)))
    return Levels(
        allocated=allocated,
        reserved=max(reserved, estimate.reserved),
        device=max(reserved + outside, estimate.device),
    )


def upper_room(*, outside: int, capacity: int) -> float:
    """The largest upper bound of allocated bytes that is sure to fit.

    Args:
        outside: upper bound of the bytes outside the allocator.
        capacity: usable bytes of the GPU.
    """
    return (capacity - outside) / (1 + UPPER_SLACK_AT_CAPACITY)


def level_model(layout: Layout, gpu: Gpu) -> LevelModel:
    """The first models for a layout on a GPU model."""
    return LevelModel(capacity=gpu.usable_bytes, outside=outside_bytes(gpu, layout))
