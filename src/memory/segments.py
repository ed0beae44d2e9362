"""Segments of the caching allocator, as far as the sizes of blocks decide on them.

PyTorch's allocator asks the driver for a segment when no free block is large enough. A free block
serves any request of its size or less; two segments are never joined. So of what earlier moments
needed, blocks as large as a request or larger can serve it, and smaller ones are stranded. Source:
`c10/cuda/CUDACachingAllocator.cpp`. Where free blocks lie between live ones is left out: that is
`src.memory.levels.HOLES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from src.units import MIB

SHARED_SEGMENT = 10 * MIB
"""Blocks up to here come from segments of 20 MiB, in which they do join."""

ROUNDING = 2 * MIB
"""Larger ones get a segment of their own, a multiple of this."""

Live = Mapping[int, float]
"""Bytes that are alive at one moment, by the size of the segments that their blocks get."""


def segment_size(block: float) -> int:
    """Bytes of the segment that a block gets; of blocks that share segments, all the same."""
    return max(SHARED_SEGMENT, -(-int(block) // ROUNDING) * ROUNDING)


def held_bytes(moments: Sequence[Live]) -> float:
    """Bytes of the segments that moments, one after the other, need.

    At each, segments are added until every block has a place: the largest first, each in a segment
    of its size or a larger one that has room.
    """
    sizes = sorted({size for live in moments for size in live}, reverse=True)
    held = [0.0] * len(sizes)
    for live in moments:
        lacking = 0.0
        for index, size in enumerate(sizes):
            lacking += live.get(size, 0.0) - held[index]
            if lacking > 0:
                held[index] += lacking
                lacking = 0.0
    return sum(held)
