"""What the caching allocator's pools hold: segments that the ledger's moments ask for, one by one.

Every term of a column is blocks of some size: the logits of one chunk, an activation, the gradient
of a table or of a block's matrix. `src.memory.segments` replays the columns in the order of the
step: the first step without the optimizer's states, which are made at its end and take what lies
free by then, and the second one beside them. Letters: V vocabulary, b bytes of an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from src.architecture.losses import UPCASTS_4X, Upcast4x
from src.memory.counts import Tensor, trained_tensors
from src.memory.instants import Column
from src.memory.levels import HOLES
from src.memory.losses import NUM_CHUNKS
from src.memory.parts import Parts
from src.memory.placement.streams import Streams
from src.memory.segments import ROUNDING, held_bytes, segment_size
from src.memory.size import FLOAT_BYTES, ZERO, Shape, Size, fixed, per_token, total, undominated
from src.memory.terms import Instant, Term
from src.memory.working import Working
from src.spec import Checkpointing, Loss, Optimizer

LARGEST_HOLE = 20 * 1024**2
"""Free ends of segments are about as large; larger blocks that outlive their step break another."""

KEPT = (
    Term.SAVED_ACTIVATIONS,
    Term.DROPOUT_MASKS,
    Term.ATTENTION_SCORES,
    Term.ATTENTION_MASK,
)
BLOCKS = (Instant.LAST_BLOCK_BACKWARD, Instant.FIRST_BLOCK_BACKWARD)
REST = 0.5
"""Of a block that blocks of another size fill up to some point, half is left on average."""

LOSS_GRADIENTS = 3
"""A chunk's backward: log-probabilities, their gradient, and that of the chunk's logits."""

NOTHING = Working(ZERO, ())
Sizes = Mapping[Term, float]
Spread = tuple[tuple[int, float], ...]
"""How the bytes of trained tensors are spread: (segment that one of them gets, share of bytes)."""


def spread(tensors: Iterable[Tensor], element_bytes: float) -> Spread:
    """The spread of tensors as this GPU has them; one small block where there are none."""
    tensors = tuple(tensors)
    numel = sum(tensor.numel for tensor in tensors)
    found: dict[int, float] = {}
    for tensor in tensors:
        segment = segment_size(tensor.numel * element_bytes)
        found[segment] = found.get(segment, 0.0) + tensor.numel / numel
    return tuple(found.items()) or ((segment_size(0), 1.0),)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What the pools of one job need, as a function of the shape.

    Attributes:
        always: alive on the computing stream throughout, but for optimizer states.
        states: optimizer states on the GPU, by the segments that they get.
        workspace: the backward pass's cuBLAS workspace, made once and never freed.
        working: what a block's forward pass needs besides.
        own: what one block's backward pass needs; alternatives.
        half, full: one block of logits as the head gives them, and in fp32.
        checkpoint: one block's input.
        recomputes: whether blocks keep nothing else.
        table: the gradient of a table of V rows; `num_tables` of them are made.
        gradients, casts: spread of the blocks' fresh gradients, and of autocast's copies.
        cast_head: autocast's copy of the head.
        temporaries: spread of the optimizer's: one for each tensor, or all as large as the largest.
        ddp: buckets, which are always there.
        streams: what lies in other pools.
        loss: how head and loss are computed.
        unshifted: the gradient of logits that 4.x shifts without an fp32 copy: the blocks of the
            shifted ones take the place of what it could take.
    """

    always: Size
    states: tuple[tuple[int, float], ...]
    workspace: float
    working: tuple[Working, ...]
    own: tuple[Size, ...]
    half: Size
    full: Size
    checkpoint: Size
    recomputes: bool
    table: float
    num_tables: int
    gradients: Spread
    casts: Spread
    cast_head: float
    temporaries: Spread
    ddp: float
    streams: Streams
    loss: Loss
    unshifted: Size

    @property
    def turns(self) -> tuple[float, ...]:
        """Numbers of tokens up to which a block of logits is too small to serve a table later.

        Beyond one of them less is held than at it.
        """
        below = segment_size(self.table) - ROUNDING
        blocks = (self.half.per_token, self.full.per_token)
        return tuple(sorted(below / block for block in blocks if self.table and block))

    def at(self, shape: Shape, ledger: Mapping[Instant, Sizes]) -> float:
        """Bytes of all pools.

        Args:
            shape: micro batch and sequence.
            ledger: the columns at that shape, in the order of instants.
        """
        return _Replay(self, shape, ledger).total()


class _Moment(dict[int, float]):
    """Bytes alive by the segments that their blocks get."""

    def add(self, block: float, num_bytes: float) -> None:
        """So many bytes of blocks of one size."""
        if num_bytes > 0:
            segment = segment_size(block)
            self[segment] = self.get(segment, 0.0) + num_bytes

    def add_spread(self, spread: Spread, num_bytes: float) -> None:
        """So many bytes of trained tensors, or of what is as large as they are."""
        if num_bytes > 0:
            for segment, share in spread:
                self[segment] = self.get(segment, 0.0) + num_bytes * share

    def beside(self, others: Iterable[tuple[int, float]]) -> _Moment:
        """The moment with others alive too."""
        found = _Moment(self)
        for segment, num_bytes in others:
            found[segment] = found.get(segment, 0.0) + num_bytes
        return found


class _Replay:
    """The pools at one shape."""

    def __init__(self, pools: Pools, shape: Shape, ledger: Mapping[Instant, Sizes]) -> None:
        self._pools = pools
        self._ledger = {at: cells for at, cells in ledger.items() if at is not Instant.LOAD}
        self._shape = shape
        self._half, self._full = pools.half.at(shape), pools.full.at(shape)
        self._checkpoint = pools.checkpoint.at(shape)
        self._own = max((size.at(shape) for size in pools.own), default=0.0)
        best = max(pools.working, key=lambda one: float(one.size.at(shape)), default=NOTHING)
        self._working = best.size.at(shape)
        self._block = max((size.at(shape) for size in best.blocks), default=0.0)
        self._activation = self._checkpoint if pools.recomputes else self._block

    def total(self) -> float:
        pools = self._pools
        step = [self._moment(instant, cells) for instant, cells in self._ledger.items()]
        moments = [*self._forward(), *step]
        always, settled = float(pools.always.at(self._shape)), list(pools.states)
        if self._breaks_a_block():
            settled.append((segment_size(self._full), self._full))
            always -= pools.workspace
        else:
            settled.append((segment_size(self._full), self._rest_of_a_block()))
        second = [moment.beside(settled) for moment in moments]
        moments += [second[-1], *second]
        return (always + held_bytes(moments)) * (1 + HOLES) + pools.streams.sides

    def _breaks_a_block(self) -> bool:
        """Whether the workspace is cut from a freed block of the loss, as no other is large enough.

        It is made by the backward pass's first matrix multiply, the head's. The second step then
        needs another block for its loss.
        """
        workspace, whole = self._pools.workspace, self._pools.loss is not Loss.LIGER
        return whole and workspace > LARGEST_HOLE and self._block < workspace < self._full

    def _rest_of_a_block(self) -> float:
        """What optimizer states leave of the last block of the loss that they are put into.

        They take smaller free blocks first, those of activations: the more of these they fill, the
        likelier some are put into one of the loss.
        """
        end, states = self._ledger[Instant.FORWARD_END], sum(size for _, size in self._pools.states)
        if not states or self._pools.loss is Loss.LIGER:
            return 0.0
        free = self._working + end.get(Term.CHECKPOINTS, 0.0) + _kept(end)
        return float(REST * self._full * min(1.0, states / max(free, 1.0)))

    def _forward(self) -> list[_Moment]:
        """A block at work, before and behind all others; then the logits of a chunk."""
        pools = self._pools
        end, kept = self._ledger[Instant.FORWARD_END], _Moment()
        kept.add(self._checkpoint, end.get(Term.CHECKPOINTS, 0.0))
        kept.add(self._activation, _kept(end))
        first, last = _Moment(), _Moment(kept)
        for moment in (first, last):
            moment.add(self._block, self._working)
            moment.add_spread(pools.gradients, pools.streams.one_block)
        if pools.loss is not Loss.CHUNKED:
            return [first, last]
        given, backward = _Moment(kept), _Moment(kept)
        given.add(self._half, self._half)
        backward.add(self._full, LOSS_GRADIENTS * self._full)
        return [first, last, given, backward]

    def _moment(self, instant: Instant, sizes: Sizes) -> _Moment:
        moment = _Moment()
        self._add_gradients(moment, instant, sizes)
        self._add_streams(moment, sizes)
        self._add_copies(moment, instant, sizes)
        self._add_activations(moment, instant, sizes)
        self._add_logits(moment, instant, sizes)
        return moment

    def _add_gradients(self, moment: _Moment, instant: Instant, sizes: Sizes) -> None:
        """Tables first, one until the backward pass reaches the embeddings; then matrices."""
        pools = self._pools
        early = instant in (Instant.LOSS_BACKWARD, Instant.LAST_BLOCK_BACKWARD)
        kept = sizes.get(Term.GRADIENTS, 0.0) if pools.streams.has_gradients else 0.0
        num_bytes = kept + sizes.get(Term.UNSHARDED_GRADIENTS, 0.0)
        count = min(1, pools.num_tables) if early else pools.num_tables
        tables = min(num_bytes, count * pools.table)
        moment.add(pools.table, tables)
        moment.add_spread(pools.gradients, num_bytes - tables)

    def _add_streams(self, moment: _Moment, sizes: Sizes) -> None:
        """Whole weights beyond those that are always there; flat buffers of gradients."""
        pools, streams = self._pools, self._pools.streams
        buffers = sizes.get(Term.COMMUNICATION_BUFFERS, 0.0) - pools.ddp
        buffers = min(buffers, streams.most_reduced)
        moment.add(buffers, buffers)
        gathered = min(sizes.get(Term.GATHERED_WEIGHTS, 0.0), streams.most_gathered)
        moment.add_spread(pools.gradients, gathered - streams.gathered)

    def _add_copies(self, moment: _Moment, instant: Instant, sizes: Sizes) -> None:
        """Autocast's copies of weights; the optimizer's temporaries."""
        pools, casts = self._pools, sizes.get(Term.CAST_WEIGHTS, 0.0)
        head = 0.0 if instant in BLOCKS else min(casts, pools.cast_head)
        moment.add(pools.cast_head, head)
        moment.add_spread(pools.casts, casts - head)
        moment.add_spread(pools.temporaries, sizes.get(Term.OPTIMIZER_TEMPORARIES, 0.0))

    def _add_activations(self, moment: _Moment, instant: Instant, sizes: Sizes) -> None:
        """Of the block at work and of those that wait; gradients of tables, logits, activations."""
        pools, kept = self._pools, _kept(sizes)
        flowing = sizes.get(Term.ACTIVATION_GRADIENTS, 0.0)
        own = min(kept, max(0.0, self._own - flowing)) if instant in BLOCKS else 0.0
        moment.add(self._checkpoint, sizes.get(Term.CHECKPOINTS, 0.0))
        moment.add(self._block, own)
        moment.add(self._activation, kept - own)
        of_loss = instant is Instant.LOSS_BACKWARD
        tables = 0.0
        if pools.table and (
            instant is Instant.FIRST_BLOCK_BACKWARD or (of_loss and pools.loss is Loss.CHUNKED)
        ):
            tables = flowing // pools.table * pools.table
        moment.add(pools.table, tables)
        moment.add(self._half if of_loss else self._block, flowing - tables)

    def _add_logits(self, moment: _Moment, instant: Instant, sizes: Sizes) -> None:
        logits = sizes.get(Term.LOGITS, 0.0)
        given = min(logits, self._half)
        temporaries = sizes.get(Term.LOSS_TEMPORARIES, 0.0)
        moment.add(self._half, given)
        moment.add(self._full, logits - given + temporaries)
        if instant is Instant.LOSS_BACKWARD:
            unshifted = self._pools.unshifted.at(self._shape)
            moment.add(unshifted, unshifted)


def _kept(sizes: Sizes) -> float:
    return sum(sizes.get(term, 0.0) for term in KEPT)


def pools_of(parts: Parts, columns: Sequence[Column]) -> Pools:
    """The pools of a job.

    Args:
        parts: what its ledger is put together from.
        columns: the ledger's, in the order of instants.
    """
    decoder, regime, placement = parts.decoder, parts.regime, parts.placement
    job, static = placement.job, parts.static
    half, full = _logits_blocks(parts)
    head = decoder.vocab_size * decoder.lm_head.in_features
    trained = regime.trains_weights
    streams = _streams(parts, columns)
    kept = placement.kept_tensors()
    layers = [
        tensor
        for tensor in trained_tensors(decoder, finetune=job.finetune, tp=placement.layout.tp)
        if not tensor.is_edge
    ]
    upcast = UPCASTS_4X.get(decoder.model_type)
    shifts = job.loss is Loss.STANDARD_4X and upcast in (Upcast4x.NONE, Upcast4x.ROUND_TRIP)
    apart = {Term.OPTIMIZER_STATES}
    if placement.method.is_zero:
        apart.add(Term.COMMUNICATION_BUFFERS)
    return Pools(
        always=total(
            [fixed(streams.gathered), *(s for term, s in static.items() if term not in apart)]
        ),
        states=_states(kept, static.get(Term.OPTIMIZER_STATES, ZERO).fixed, job.optimizer),
        workspace=static[Term.WORKSPACES].fixed / 2,
        working=tuple(undominated({one for block in parts.blocks for one in block.working})),
        own=tuple({moment.size for block in parts.blocks for moment in block.moments}),
        half=half,
        full=full,
        checkpoint=_block_input(parts),
        recomputes=regime.checkpointing is Checkpointing.FULL,
        table=float(head * regime.gradient_bytes * trained),
        num_tables=(1 if decoder.lm_head.tied else 2) * trained,
        gradients=spread(layers, regime.gradient_bytes if trained else FLOAT_BYTES),
        casts=spread(layers, regime.compute_bytes),
        cast_head=float(head * regime.compute_bytes),
        temporaries=spread(
            kept if job.optimizer is Optimizer.ADAMW else _largest(kept), placement.trained_bytes
        ),
        ddp=static.get(Term.COMMUNICATION_BUFFERS, ZERO).fixed,
        streams=streams,
        loss=job.loss,
        unshifted=(full if regime.autocast else half) if shifts else ZERO,
    )


def _largest(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return sorted(tensors, key=lambda tensor: tensor.numel)[-1:]


def _states(
    tensors: Sequence[Tensor], num_bytes: float, optimizer: Optimizer
) -> tuple[tuple[int, float], ...]:
    """Optimizer states by the segments that they get."""
    if not num_bytes:
        return ()
    numel = sum(tensor.numel for tensor in tensors)
    element_bytes = num_bytes / numel / max(1, optimizer.states_per_parameter)
    shares = spread(tensors, element_bytes)
    return tuple((segment, num_bytes * share) for segment, share in shares)


def _logits_blocks(parts: Parts) -> tuple[Size, Size]:
    """One block of logits as the head gives them, and in fp32: of all tokens or of a chunk."""
    vocab, given = parts.decoder.vocab_size, parts.regime.logits_bytes
    if parts.regime.loss is Loss.LIGER:
        return Size(per_row=vocab * given), Size(per_row=vocab * given)
    tokens = vocab / (NUM_CHUNKS if parts.regime.loss is Loss.CHUNKED else 1)
    return per_token(tokens * given), per_token(tokens * FLOAT_BYTES)


def _block_input(parts: Parts) -> Size:
    source = parts.blocks[0].source
    if source != ZERO:
        return source
    return per_token(parts.decoder.hidden_size * parts.regime.compute_bytes)


def _streams(parts: Parts, columns: Sequence[Column]) -> Streams:
    """What lies in other streams' pools; DeepSpeed's as large as its terms ever are."""
    if not parts.placement.method.is_zero:
        return parts.placement.streams()
    terms = (Term.GATHERED_WEIGHTS, Term.COMMUNICATION_BUFFERS)
    sides = sum(max(column.terms.get(term, ZERO).fixed for column in columns) for term in terms)
    return Streams(most_gathered=0.0, most_reduced=0.0, sides=sides)
