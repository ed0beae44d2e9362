"""Parameters on one GPU, by part: left by tensor parallelism, trained, quantised, sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from src.architecture import Block, Decoder
from src.architecture.ops import Embed, Experts, Linear, Norm, Op, Parallel, Parameter
from src.memory.tuning import Storage, is_quantised, is_target, storage_of, trains_block
from src.spec import Finetune, FinetuneKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Elements of one part on one GPU, unless they say bytes.

    Attributes:
        dense: the model's own parameters that are not quantised, after tensor parallelism.
        packed: those that are.
        trained_base: those of the model's own that are trained.
        adapters: what PEFT adds.
        norms: of `dense`, weights and biases of norms.
        base_shard, trained_base_shard, adapters_shard, norms_shard: of `dense`, `trained_base`,
            `adapters` and `norms`, what the fullest rank keeps when each tensor is split along its
            first dimension over the shard group.
        packed_bytes, packed_shard_bytes: of quantised weights, whole and so split.
        statistics_bytes: of their scales and tables, which are never split.
        largest: the largest tensor of the model's own.
        small: elements in tensors at or below DeepSpeed's persistence threshold.
    """

    dense: float = 0
    packed: float = 0
    trained_base: float = 0
    adapters: float = 0
    norms: float = 0
    base_shard: float = 0
    trained_base_shard: float = 0
    adapters_shard: float = 0
    norms_shard: float = 0
    packed_bytes: float = 0
    packed_shard_bytes: float = 0
    statistics_bytes: float = 0
    largest: float = 0
    small: float = 0

    @property
    def base(self) -> float:
        """The model's own parameters, however they are stored."""
        return self.dense + self.packed

    @property
    def trained(self) -> float:
        """Trained elements."""
        return self.trained_base + self.adapters

    @property
    def trained_shard(self) -> float:
        """Trained elements of the fullest rank's shard."""
        return self.trained_base_shard + self.adapters_shard

    def bytes_of(self, *, dense: float, norm: float, adapter: float) -> float:
        """Bytes of the whole part without statistics, at those bytes per element."""
        return (
            (self.dense - self.norms) * dense
            + self.norms * norm
            + self.adapters * adapter
            + self.packed_bytes
        )

    def shard_bytes_of(self, *, dense: float, norm: float, adapter: float) -> float:
        """The same of the fullest rank's shard."""
        return (
            (self.base_shard - self.norms_shard) * dense
            + self.norms_shard * norm
            + self.adapters_shard * adapter
            + self.packed_shard_bytes
        )

    @classmethod
    def together(cls, parts: Sequence[Counts]) -> Counts:
        """All parts together."""
        sums = {name: sum([getattr(part, name) for part in parts]) for name in _SUMMED}
        return cls(largest=max([part.largest for part in parts], default=0), **sums)

    def times(self, factor: int) -> Counts:
        """The part `factor` times."""
        return Counts(
            largest=self.largest, **{name: getattr(self, name) * factor for name in _SUMMED}
        )


_SUMMED = tuple(field.name for field in fields(Counts) if field.name != "largest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter on one GPU, before sharding.

    Attributes:
        shape: of the whole tensor; it is sharded along the first dimension.
        numel: elements on this GPU, after tensor parallelism.
        trained: whether it is trained.
        is_adapter: whether PEFT has added it; then it is trained.
        is_embedding: whether it is a lookup's table.
        is_norm: whether it is a norm's.
        is_edge: whether it lies outside the blocks.
        storage: how it lies where it is quantised; else None.
    """

    shape: tuple[int, ...]
    numel: float
    trained: bool = True
    is_adapter: bool = False
    is_embedding: bool = False
    is_norm: bool = False
    is_edge: bool = False
    storage: Storage | None = None

    def shard(self, parts: int) -> float:
        """Elements of the fullest rank where rows are dealt out in equal, rounded-up runs."""
        return _split(self.shape[0], parts, self.numel)

    def stored(self, element_bytes: int) -> float:
        """Elements as stored: packed bytes of a quantised one as elements of so many bytes."""
        return self.numel if self.storage is None else self.storage.weight_bytes / element_bytes

    def count(self, shard: int, threshold: int) -> Counts:
        """The tensor as a part of its own; arguments as in `count_model`."""
        numel, part = self.numel, self.shard(shard)
        if self.is_adapter:
            return Counts(adapters=numel, adapters_shard=part)
        if self.storage is not None:
            packed = self.storage.weight_bytes
            return Counts(
                packed=numel,
                packed_bytes=packed,
                packed_shard_bytes=_split(self.storage.rows, shard, packed),
                statistics_bytes=self.storage.statistics_bytes,
                largest=numel,
            )
        return Counts(
            dense=numel,
            base_shard=part,
            trained_base=numel if self.trained else 0,
            trained_base_shard=part if self.trained else 0,
            norms=numel if self.is_norm else 0,
            norms_shard=part if self.is_norm else 0,
            largest=numel,
            small=numel if numel <= threshold else 0,
        )


def _split(rows: int, parts: int, amount: float) -> float:
    """What of `amount` the fullest of `parts` ranks gets of `rows` in equal, rounded-up runs."""
    return -(-rows // parts) * amount / rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _How:
    """What tensors are counted under.

    Attributes:
        finetune: which parameters are trained.
        head: name of the Linear that makes the logits: never quantised or adapted.
        tp: tensor-parallel degree.
    """

    finetune: Finetune
    head: str
    tp: int

    def tensors(self, block: Block, *, trained: bool, is_edge: bool) -> Iterator[Tensor]:
        """The parameters of a block, in the order of its operations.

        Args:
            block: its operations.
            trained: whether its own parameters are trained.
            is_edge: whether it is none of the repeated blocks.
        """
        for op in block.ops:
            for parameter in op.parameters():
                yield self._own(op, parameter, trained=trained, is_edge=is_edge)
            if isinstance(op, Linear) and is_target(op, self.finetune, self.head):
                yield from _adapter_tensors(op, self.finetune, self.tp)

    def _own(self, op: Op, parameter: Parameter, *, trained: bool, is_edge: bool) -> Tensor:
        split = isinstance(op, Experts) or (
            isinstance(op, Linear) and op.parallel is not Parallel.REPLICATED
        )
        whole_bias = isinstance(op, Linear) and op.parallel.splits_inputs
        is_matrix = len(parameter.shape) > 1
        divide = split and (is_matrix or not whole_bias)
        storage = None
        if is_matrix and is_quantised(op, self.finetune, self.head):
            outputs = parameter.shape[0]
            storage = storage_of(self.finetune, outputs=outputs, numel=parameter.numel)
        return Tensor(
            shape=parameter.shape,
            numel=parameter.numel / (self.tp if divide else 1),
            trained=trained,
            is_embedding=isinstance(op, Embed),
            is_norm=isinstance(op, Norm),
            is_edge=is_edge,
            storage=storage,
        )


def _adapter_tensors(op: Linear, finetune: Finetune, tp: int) -> Iterator[Tensor]:
    """LoRA's A and B: the split side follows the Linear, where what is outside it is split too.

    DoRA has a magnitude for each output besides.
    """
    rank = finetune.r
    down = rank * op.in_features / (tp if op.parallel is Parallel.ROW else 1)
    up = rank * op.width / (tp if op.parallel is Parallel.COLUMN else 1)
    yield Tensor(shape=(rank, op.in_features), numel=down, is_adapter=True)
    yield Tensor(shape=(op.width, rank), numel=up, is_adapter=True)
    if finetune.dora:
        yield Tensor(shape=(op.width,), numel=op.width, is_adapter=True)


@lru_cache(maxsize=1024)
def model_tensors(
    decoder: Decoder, finetune: Finetune, tp: int = 1
) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...], tuple[Tensor, ...]]:
    """Tensors in front of the blocks, of each block (equal ones are one object), and behind."""
    how = _How(finetune=finetune, head=decoder.lm_head.name, tp=tp)
    whole = finetune.trains_everything
    of_block: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
    blocks: list[tuple[Tensor, ...]] = []
    for index, block in enumerate(decoder.blocks):
        trained = trains_block(finetune, index, decoder.num_layers)
        key = (id(block), trained)
        if key not in of_block:
            of_block[key] = tuple(how.tensors(block, trained=trained, is_edge=False))
        blocks.append(of_block[key])
    front, *behind = (
        tuple(how.tensors(edge, trained=whole, is_edge=True))
        for edge in (decoder.stem, decoder.tail, decoder.head)
    )
    return front, tuple(blocks), (*behind[0], *behind[1], *_virtual_tokens(decoder, finetune))


def _virtual_tokens(decoder: Decoder, finetune: Finetune) -> Iterator[Tensor]:
    """PEFT's `prompt_encoder`: an embedding behind everything else.

    A prompt's tokens are as wide as hidden states; a prefix's hold a key and a value of each block.
    """
    widths = {
        FinetuneKind.PROMPT: decoder.hidden_size,
        FinetuneKind.PREFIX: 2
        * decoder.num_layers
        * decoder.attention.num_kv_heads
        * decoder.attention.head_dim,
    }
    if finetune.kind in widths:
        shape = (finetune.num_virtual_tokens, widths[finetune.kind])
        numel = shape[0] * shape[1]
        yield Tensor(shape=shape, numel=numel, is_adapter=True, is_embedding=True, is_edge=True)


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
    """Counts of a model's parts.

    Args:
        decoder: the model.
        finetune: which parameters are trained.
        tp: tensor-parallel degree.
        shard: GPUs over which tensors are split.
        threshold: DeepSpeed's persistence threshold, in elements.
    """
    front, blocks, behind = model_tensors(decoder, finetune, tp)

    def together(tensors: Sequence[Tensor]) -> Counts:
        return Counts.together([tensor.count(shard, threshold) for tensor in tensors])

    seen = {id(tensors): together(tensors) for tensors in {id(t): t for t in blocks}.values()}
    edges = together([*front, *behind])
    inner = Counts.together(
        [part.times(sum(id(t) == key for t in blocks)) for key, part in seen.items()]
    )
    counted = tuple(seen[id(tensors)] for tensors in blocks)
    return ModelCounts(
        edges=edges,
        blocks=counted,
        blocks_together=inner,
        largest_block=max(counted, key=lambda part: part.base),
        all=Counts.together([edges, inner]),
    )


@lru_cache(maxsize=1024)
def trained_tensors(
    decoder: Decoder, *, finetune: Finetune, tp: int = 1, shard: int = 1
) -> tuple[Tensor, ...]:
    """Every trained parameter as the fullest rank of `shard` GPUs keeps it, in the model's order.

    That is: embeddings, blocks, final norm, head.
    """
    front, blocks, behind = model_tensors(decoder, finetune, tp)
    kept: dict[int, list[Tensor]] = {}
    found: list[Tensor] = []
    for tensors in (front, *blocks, behind):
        if id(tensors) not in kept:
            kept[id(tensors)] = [
                replace(tensor, numel=tensor.shard(shard)) for tensor in tensors if tensor.trained
            ]
        found += kept[id(tensors)]
    return tuple(found)
