"""How DeepSpeed cuts trained tensors into partitions, and in which order its bucket takes them.

Stages 1 and 2 lay all trained tensors end to end and cut them into N equal runs, wherever that cuts
a tensor; stage 3 cuts every tensor into N. Letters: N ranks, T trained elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from src.architecture import Decoder
from src.memory.counts import model_tensors
from src.spec import Finetune

ALIGNMENT = 2
"""Elements that each rank's run is a multiple of (`nccl_start_alignment_factor`)."""
EMBEDDINGS = -1
"""The place of what runs backward after all blocks."""


class Placed(NamedTuple):
    """One tensor.

    Attributes:
        block: number of its block; `EMBEDDINGS`, or the number of blocks for final norm and head.
        numel: its elements.
        trained: whether it is.
    """

    block: int
    numel: int
    trained: bool


@lru_cache(maxsize=256)
def placed_tensors(
    decoder: Decoder, finetune: Finetune, *, element_bytes: int = 2
) -> tuple[Placed, ...]:
    """Every parameter of the model, adapters included, in the model's order.

    Quantised ones count as elements of `element_bytes` that their packed bytes are stored as.
    """
    front, blocks, behind = model_tensors(decoder, finetune)
    parts = [(EMBEDDINGS, front), *enumerate(blocks), (decoder.num_layers, behind)]
    of_part: dict[int, list[tuple[int, bool]]] = {}
    found: list[Placed] = []
    for index, tensors in parts:
        if id(tensors) not in of_part:
            of_part[id(tensors)] = [
                (round(tensor.stored(element_bytes)), tensor.trained) for tensor in tensors
            ]
        found += [Placed(index, *tensor) for tensor in of_part[id(tensors)]]
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's run of the tensors laid end to end.

    Attributes:
        elements: of the run, padding included.
        sizes: elements of each tensor that reaches into the run, whole.
        largest: elements of the largest piece of a tensor.
    """

    elements: int
    sizes: tuple[int, ...]
    largest: int

    @property
    def whole(self) -> int:
        """Elements of all tensors that reach into the run, each whole."""
        return sum(self.sizes)


@lru_cache(maxsize=256)
def shares(decoder: Decoder, finetune: Finetune, ranks: int) -> tuple[Share, ...]:
    """Every rank's share of the trained tensors."""
    sizes = [tensor.numel for tensor in placed_tensors(decoder, finetune) if tensor.trained]
    run = rounded_up(sum(sizes), ALIGNMENT * ranks) // ranks
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    start = 0
    for numel in sizes:
        end = start + numel
        for rank in range(start // run, (end - 1) // run + 1):
            inside = min(end, (rank + 1) * run) - max(start, rank * run)
            pieces[rank].append((numel, inside))
        start = end
    return tuple(
        Share(
            elements=run,
            sizes=tuple(numel for numel, _ in of_rank),
            largest=max((inside for _, inside in of_rank), default=0),
        )
        for of_rank in pieces
    )


class Reduction(NamedTuple):
    """One emptying of the reduce bucket.

    Attributes:
        block: the block whose backward pass runs; as `Placed.block`.
        elements: gradients in it.
        tensors: how many.
        owners: ranks whose runs they lie in.
        after: gradients that were reduced before it, in elements.
    """

    block: int
    elements: int
    tensors: int
    owners: int
    after: int


@lru_cache(maxsize=256)
def reductions(
    decoder: Decoder, finetune: Finetune, ranks: int, bucket: int, *, backward: bool
) -> tuple[Reduction, ...]:
    """Every emptying of a bucket of that many elements; the last one ends the backward pass.

    The bucket is emptied when the next gradient does not fit.

    Args:
        decoder: the model.
        finetune: what of it is trained.
        ranks: N.
        bucket: elements it holds.
        backward: whether gradients come as the backward pass makes them, else in the model's order.
    """
    trained = [tensor for tensor in placed_tensors(decoder, finetune) if tensor.trained]
    total = sum(tensor.numel for tensor in trained)
    run = rounded_up(total, ALIGNMENT * ranks) // ranks
    found: list[Reduction] = []
    for group, at in _filled(reversed(trained) if backward else trained, bucket):
        after = sum(reduction.elements for reduction in found)
        elements = sum(tensor.numel for tensor in group)
        start = total - after - elements if backward else after
        owners = (start + elements - 1) // run - start // run + 1
        found.append(Reduction(at, elements, len(group), owners, after))
    return tuple(found)


def _filled(tensors: Iterable[Placed], bucket: int) -> Iterator[tuple[list[Placed], int]]:
    """Runs of tensors that a bucket takes, each with the block that is at work when it is full."""
    group: list[Placed] = []
    held = 0
    for tensor in tensors:
        if group and held + tensor.numel > bucket:
            yield group, tensor.block
            group, held = [], 0
        group.append(tensor)
        held += tensor.numel
    if group:
        yield group, EMBEDDINGS


def prefetched(tensors: Sequence[Placed], bucket: int) -> Iterator[list[Placed]]:
    """Runs of tensors that are gathered together: as many as reach `bucket` elements."""
    group: list[Placed] = []
    held = 0
    for tensor in tensors:
        group.append(tensor)
        held += tensor.numel
        if held >= bucket:
            yield group
            group, held = [], 0
    if group:
        yield group


def rounded_up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


def pinned_bytes(num_bytes: float) -> float:
    """What page-locked memory of that size takes: PyTorch rounds it up to a power of two.

    Source: `round_size` in ATen/core/CachingHostAllocator.h, with the default
    `pinned_max_round_threshold`.
    """
    whole = int(num_bytes)
    return float(1 << (whole - 1).bit_length()) if whole > 1 else float(whole)
