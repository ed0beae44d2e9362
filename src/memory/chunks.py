"""The chunk size that Colossal-AI's Gemini searches for, without running it.

Gemini keeps parameters in chunks of one size, filled in the model's order; what does not fit into
the rest of a chunk opens the next. `search_chunk_configuration` (hpcaitech/ColossalAI,
`colossalai/zero/gemini/chunk/search_utils.py`, as of mid 2023, which LLMem runs) tries every
multiple of an interval from the largest tensor, or the least chunk, up to a range above it, and
keeps the first that wastes least. Tensors larger than the mean by three standard deviations take no
part: each gets a chunk of its own size. Its arguments are named in megabytes and compared with
numbers of elements, and so they are here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, pstdev

SMALLEST_CHUNK = 32 * 1024**2
"""Elements of the least chunk: `min_chunk_size_mb`, GeminiPlugin's default."""

SEARCH_RANGE = 32 * 1024**2
"""Elements that the search goes beyond its start: `search_range_mb`, GeminiPlugin's default."""

SEARCH_INTERVAL = 1024
"""Elements between two sizes that are tried; where no `hidden_dim` is given."""

DEVIATIONS = 3
"""Standard deviations above the mean beyond which a tensor takes no part in the search."""


def chunk_elements(tensors: Sequence[int], *, group: int) -> int:
    """Elements of one chunk.

    Args:
        tensors: elements of every parameter tensor, in the model's order.
        group: GPUs that a chunk is dealt out to; its size is a multiple of them.
    """
    total = sum(tensors)
    if total < SMALLEST_CHUNK:
        return total
    limit = fmean(tensors) + DEVIATIONS * pstdev(tensors)
    ends = [0, *accumulate(numel for numel in tensors if numel <= limit)]
    largest = max(numel for numel in tensors if numel <= limit)
    best = _least_waste(ends, _up(max(SMALLEST_CHUNK, largest), SEARCH_INTERVAL))
    return _up(best, group)


def _least_waste(ends: list[int], start: int) -> int:
    """The first size tried whose chunks hold least beside the tensors.

    The more a chunk holds, the fewer are filled, and as long as their number stays, a larger one
    wastes more. So only the sizes at which the number falls are looked at, each found by bisection.

    Args:
        ends: where each tensor ends, in elements, behind a leading 0.
        start: the smallest size tried, no smaller than any tensor.
    """
    last = start + SEARCH_RANGE // SEARCH_INTERVAL * SEARCH_INTERVAL
    fewest = num_chunks(ends, last)
    size, count = start, num_chunks(ends, start)
    best, waste = size, count * size
    while count > fewest:
        low, high = size, last
        while high - low > SEARCH_INTERVAL:
            middle = low + (high - low) // (2 * SEARCH_INTERVAL) * SEARCH_INTERVAL
            low, high = (low, middle) if num_chunks(ends, middle) < count else (middle, high)
        size, count = high, num_chunks(ends, high)
        if count * size < waste:
            best, waste = size, count * size
    return best


def num_chunks(ends: list[int], size: int) -> int:
    """Chunks of `size` elements that hold tensors ending at `ends`, each whole, in order."""
    filled = count = 0
    while filled < len(ends) - 1:
        filled = bisect_right(ends, ends[filled] + size) - 1
        count += 1
    return count


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
