"""Parameters on one GPU, by part: left by tensor parallelism, trained, sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from src.architecture import Block, Decoder
from src.architecture.ops import Embed, Experts, Linear, Parallel
from src.memory.lowering import is_target
from src.spec import Finetune


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Elements of one part on one GPU.

    Attributes:
        base: the model's own parameters, after tensor parallelism.
        adapters: LoRA's.
        base_shard, adapters_shard: of those, what the fullest rank keeps when each tensor is split
            along its first dimension over the shard group.
        largest: the largest tensor of the model's own.
        small: elements in tensors at or below DeepSpeed's persistence threshold.
        trains_base: whether the model's own parameters are trained.
    """

    base: float
    adapters: float
    base_shard: float
    adapters_shard: float
    largest: float
    small: float
    trains_base: bool

    @property
    def trained(self) -> float:
        """Trained elements."""
        return (self.base if self.trains_base else 0) + self.adapters

    @property
    def trained_shard(self) -> float:
        """Trained elements of the fullest rank's shard."""
        return (self.base_shard if self.trains_base else 0) + self.adapters_shard

    def plus(self, other: Counts) -> Counts:
        """Both parts together."""
        return Counts(
            base=self.base + other.base,
            adapters=self.adapters + other.adapters,
            base_shard=self.base_shard + other.base_shard,
            adapters_shard=self.adapters_shard + other.adapters_shard,
            largest=max(self.largest, other.largest),
            small=self.small + other.small,
            trains_base=self.trains_base,
        )

    def times(self, factor: int) -> Counts:
        """The part `factor` times."""
        return Counts(
            base=self.base * factor,
            adapters=self.adapters * factor,
            base_shard=self.base_shard * factor,
            adapters_shard=self.adapters_shard * factor,
            largest=self.largest,
            small=self.small * factor,
            trains_base=self.trains_base,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter on one GPU, before sharding.

    Attributes:
        shape: of the whole tensor; it is sharded along the first dimension.
        numel: elements on this GPU, after tensor parallelism.
        is_adapter: whether it is LoRA's.
        is_embedding: whether it is a lookup's table.
        is_edge: whether it lies outside the blocks.
    """

    shape: tuple[int, ...]
    numel: float
    is_adapter: bool = False
    is_embedding: bool = False
    is_edge: bool = False

    def shard(self, parts: int) -> float:
        """Elements of the fullest rank where rows are dealt out in equal, rounded-up runs."""
        rows = self.shape[0]
        return -(-rows // parts) * self.numel / rows


def block_tensors(block: Block, *, finetune: Finetune, tp: int, adapts: bool) -> Iterator[Tensor]:
    """The parameters of a block, in the order of its operations; arguments as in `count_block`."""
    for op in block.ops:
        split = isinstance(op, Experts) or (
            isinstance(op, Linear) and op.parallel is not Parallel.REPLICATED
        )
        for parameter in op.parameters():
            whole_bias = isinstance(op, Linear) and op.parallel.splits_inputs
            divide = split and not (whole_bias and len(parameter.shape) == 1)
            yield Tensor(
                shape=parameter.shape,
                numel=parameter.numel / (tp if divide else 1),
                is_embedding=isinstance(op, Embed),
                is_edge=not adapts,
            )
        if adapts and finetune.is_lora and isinstance(op, Linear) and is_target(op, finetune):
            yield from _adapter_tensors(op, finetune.r, tp)


def _adapter_tensors(op: Linear, rank: int, tp: int) -> Iterator[Tensor]:
    """LoRA's A and B: the split side follows the Linear, where what is outside it is split too."""
    down = rank * op.in_features / (tp if op.parallel is Parallel.ROW else 1)
    up = rank * op.width / (tp if op.parallel is Parallel.COLUMN else 1)
    yield Tensor(shape=(rank, op.in_features), numel=down, is_adapter=True)
    yield Tensor(shape=(op.width, rank), numel=up, is_adapter=True)


def count_block(
    block: Block, *, finetune: Finetune, tp: int, shard: int, threshold: int, adapts: bool
) -> Counts:
    """Counts of one block.

    Args:
        block: its operations.
        finetune: which parameters are trained.
        tp: tensor-parallel degree.
        shard: GPUs over which tensors are split.
        threshold: DeepSpeed's persistence threshold, in elements.
        adapts: whether LoRA may adapt Linears here (it leaves the head alone).
    """
    base = adapters = base_shard = adapters_shard = largest = small = 0.0
    for tensor in block_tensors(block, finetune=finetune, tp=tp, adapts=adapts):
        numel, part = tensor.numel, tensor.shard(shard)
        if tensor.is_adapter:
            adapters += numel
            adapters_shard += part
            continue
        base += numel
        base_shard += part
        largest = max(largest, numel)
        small += numel if numel <= threshold else 0
    return Counts(
        base=base,
        adapters=adapters,
        base_shard=base_shard,
        adapters_shard=adapters_shard,
        largest=largest,
        small=small,
        trains_base=not finetune.is_lora,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounts:
    """Counts of the parts of a model on one GPU.

    Attributes:
        edges: embeddings, final norm and head: FSDP's root unit.
        blocks: every block, in order.
        blocks_together: all of them.
        largest_block: the block with most parameters.
        all: everything.
    """

    edges: Counts
    blocks: tuple[Counts, ...]
    blocks_together: Counts
    largest_block: Counts
    all: Counts


@lru_cache(maxsize=1024)
def count_model(
    decoder: Decoder, *, finetune: Finetune, tp: int = 1, shard: int = 1, threshold: int = 0
) -> ModelCounts:
    """Counts of a model's parts; arguments as in `count_block`."""
    seen: dict[int, Counts] = {}
    blocks: list[Counts] = []
    for block in decoder.blocks:
        if id(block) not in seen:
            seen[id(block)] = count_block(
                block, finetune=finetune, tp=tp, shard=shard, threshold=threshold, adapts=True
            )
        blocks.append(seen[id(block)])
    edges = [
        count_block(part, finetune=finetune, tp=tp, shard=shard, threshold=threshold, adapts=False)
        for part in (decoder.stem, decoder.tail, decoder.head)
    ]
    together = edges[0].plus(edges[1]).plus(edges[2])
    repeated = [part.times(sum(block is part for block in blocks)) for part in seen.values()]
    inner = repeated[0]
    for part in repeated[1:]:
        inner = inner.plus(part)
    return ModelCounts(
        edges=together,
        blocks=tuple(blocks),
        blocks_together=inner,
        largest_block=max(blocks, key=lambda part: part.base),
        all=together.plus(inner),
    )


@lru_cache(maxsize=1024)
def trained_tensors(
    decoder: Decoder, *, finetune: Finetune, tp: int = 1, shard: int = 1
) -> tuple[Tensor, ...]:
    """Every trained parameter as the fullest rank of `shard` GPUs keeps it, in the model's order.

    That is: embeddings, blocks, final norm, head.
    """
    parts = ((decoder.stem,), decoder.blocks, (decoder.tail, decoder.head))
    found: list[Tensor] = []
    of_block: dict[int, list[Tensor]] = {}
    for adapts, blocks in zip((False, True, False), parts, strict=True):
        for block in blocks:
            if id(block) not in of_block:
                of_block[id(block)] = [
                    replace(tensor, numel=tensor.shard(shard))
                    for tensor in block_tensors(block, finetune=finetune, tp=tp, adapts=adapts)
                    if tensor.is_adapter or not finetune.is_lora
                ]
            found += of_block[id(block)]
    return tuple(found)
