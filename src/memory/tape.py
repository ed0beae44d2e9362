"""A symbolic autograd tape: what a forward pass keeps, and what is live as it is used up.

`src.memory.lowering` writes a block's operations down as the nodes that autograd would record. The
tape then walks them backwards as the engine does: a node's output gradient and saved tensors are
released after it has run, a gradient that arrives second is added in place to the first, gradients
of parameters stay. Every size is symbolic (`Size`): one walk serves every micro batch and sequence.

A checkpointed function keeps its inputs instead; what its nodes save is there again from the moment
on that the backward pass reaches the last node that saves anything (`torch.utils.checkpoint`, not
reentrant).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from src.memory.size import ZERO, Size, total, undominated
from src.memory.terms import Term
from src.memory.values import Moment, Terms, Value, merged
from src.memory.walk import Node, Region, Walk
from src.memory.working import Operation, Working, running, working_sets


@dataclass
class Tape:
    """Records nodes, then walks them backwards.

    Attributes:
        runs_again: whether the nodes are those of a recomputation: then what they retain is that of
            the first forward pass, other tensors than those that they save.
        token_share: the part of the micro batch's tokens that new tensors are of.
        offloads: whether what is saved waits in host memory (`save_on_cpu`): a copy for each node
            that saves it, parameters among them, of which the node gets a copy back when it runs.
    """

    runs_again: bool = False
    offloads: bool = False

    _sizes: list[Size] = field(default_factory=list)
    _terms: list[Term] = field(default_factory=list)
    _nodes: list[Node] = field(default_factory=list)
    _constants: set[Value] = field(default_factory=set)
    _kept: set[int] = field(default_factory=set)
    _added_apart: set[Value] = field(default_factory=set)
    _regions: list[Region] = field(default_factory=list)
    _region: int | None = None
    token_share: float = 1.0
    _retained: set[int] = field(default_factory=set)
    _operations: list[Operation] = field(default_factory=list)
    _cached: set[int] = field(default_factory=set)
    _beside: tuple[Size, ...] = ()

    def tensor(
        self,
        width: float,
        dtype_bytes: int,
        *,
        share: float = 1.0,
        size: Size | None = None,
        term: Term = Term.SAVED_ACTIVATIONS,
        requires_grad: bool = True,
        counted: bool = True,
    ) -> Value:
        """A new tensor with a storage of its own.

        Args:
            width: elements per token on this GPU.
            dtype_bytes: bytes per element.
            share: part of the full width that this GPU holds.
            size: bytes, where they are not `width * dtype_bytes` per token.
            term: the ledger's row if it is saved.
            requires_grad: whether a gradient flows into it.
            counted: False for storages that are counted elsewhere.
        """
        by_width = Size(per_token=width * dtype_bytes * self.token_share)
        bytes_ = by_width if size is None else size
        self._sizes.append(bytes_ if counted else ZERO)
        self._terms.append(term)
        return Value(
            size=bytes_,
            width=width,
            dtype_bytes=dtype_bytes,
            share=share,
            storage=len(self._sizes) - 1,
            requires_grad=requires_grad,
        )

    def parameter(
        self, numel: float, dtype_bytes: int, *, requires_grad: bool, accumulates: bool = False
    ) -> Value:
        """A parameter; its own bytes are counted elsewhere, its gradient stays."""
        self._sizes.append(ZERO)
        self._terms.append(Term.WEIGHTS)
        return Value(
            size=Size(fixed=numel * dtype_bytes),
            width=0,
            dtype_bytes=dtype_bytes,
            share=1.0,
            storage=len(self._sizes) - 1,
            requires_grad=requires_grad,
            is_parameter=True,
            accumulates=accumulates,
        )

    def view(self, source: Value, width: float) -> Value:
        """A part of a tensor, sharing its storage; `width` on this GPU."""
        value = Value(
            size=Size(per_token=width * source.dtype_bytes * self.token_share),
            width=width,
            dtype_bytes=source.dtype_bytes,
            share=source.share,
            storage=source.storage,
        )
        self.record(value, [source], passed=[source], is_part=value.size != source.size)
        return value

    def pieces(self, source: Value, count: int) -> list[Value]:
        """A tensor cut along its tokens into `count` equal views."""
        found = [replace(source, size=source.size.times(1 / count)) for _ in range(count)]
        for piece in found:
            self.record(piece, [source], passed=[source], is_part=True)
        return found

    @contextmanager
    def checkpointed(self, inputs: Sequence[Value]) -> Iterator[None]:
        """What is recorded within is recomputed in the backward pass, from `inputs`.

        Those that a gradient flows into are saved as nodes save tensors, others are held.
        """
        moved = [value for value in inputs if self.offloads and self.needs_gradient(value)]
        held = frozenset(value.storage for value in inputs if value not in moved)
        self._region = len(self._regions)
        self._regions.append(Region(held, tuple(moved)))
        yield
        self._region = None

    def record(
        self,
        out: Value,
        inputs: Sequence[Value],
        *,
        saved: Sequence[Value] = (),
        passed: Sequence[Value] = (),
        is_part: bool = False,
        temporary: Size = ZERO,
        retained: Sequence[Value] = (),
    ) -> None:
        """One autograd node.

        Args:
            out: its output.
            inputs: its differentiable inputs.
            saved: tensors it keeps for its backward.
            passed: inputs that take the output's gradient itself, not a copy.
            is_part: whether the output is a part of the one input.
            temporary: bytes its backward allocates and frees besides the inputs' gradients.
            retained: tensors it has as plain attributes: they live as long as the graph, that is
                to the end of the whole backward pass, and checkpointing does not drop them.
        """
        self._operate(out, inputs, saved, temporary)
        if out.requires_grad and self._terms[out.storage] is Term.CAST_WEIGHTS:
            self._cached.add(out.storage)
        differentiable = tuple(value for value in inputs if self.needs_gradient(value))
        if not differentiable:
            self._constants.add(out)
            return
        self._retained.update(value.storage for value in retained)
        self._nodes.append(
            Node(
                out,
                differentiable,
                frozenset(value.storage for value in saved),
                frozenset(passed),
                is_part,
                temporary,
                self._region,
                tuple(saved),
            )
        )
        self._operations[-1] = self._operations[-1]._replace(num_nodes=len(self._nodes))

    def _operate(
        self, out: Value, inputs: Sequence[Value], saved: Sequence[Value], temporary: Size
    ) -> None:
        self._operations.append(
            Operation(
                out,
                tuple(inputs),
                tuple(saved),
                temporary,
                self._beside,
                len(self._nodes),
                self._region,
            )
        )

    def read(self, value: Value) -> None:
        """The forward pass still has this tensor, though no operation reads it again."""
        self._operate(value, (value,), (), ZERO)

    @contextmanager
    def beside(self, *sizes: Size) -> Iterator[None]:
        """While what is recorded within runs forward, tensors of these sizes are alive besides.

        They are no part of the graph: the backward pass has them only where it runs forward again.
        """
        self._beside = sizes
        yield
        self._beside = ()

    def needs_gradient(self, value: Value) -> bool:
        """Whether a gradient flows into a value: it or something it came from is trained."""
        return value.requires_grad and value not in self._constants

    def keep(self, value: Value) -> None:
        """Keep a tensor to the end of the backward pass, whether or not a node saves it."""
        self._kept.add(value.storage)

    def add_apart(self, value: Value) -> None:
        """Gradients of this value are distributed tensors, which autograd adds into a third one.

        Source: `can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp.
        """
        self._added_apart.add(value)

    def saved(self, *, without: Value) -> Terms:
        """Everything kept for the backward pass, by term; each storage once.

        Args:
            without: a tensor that was only kept by `keep` is left out where it is this one.
        """
        return self._by_term(self._apart(self._held() | (self._kept - {without.storage})))

    def _apart(self, storages: set[int]) -> set[int]:
        """Saved storages without those that are counted as retained."""
        return storages if self.runs_again else storages - self._retained

    def retained(self) -> Terms:
        """What lives to the end of the backward pass (see `record`)."""
        return self._by_term(self._retained)

    def working(self, source: Value, out: Value) -> tuple[Working, ...]:
        """What the forward pass from `source` to `out` needs besides what it keeps.

        Autocast keeps its copies of trained weights too.
        """
        kept = self._cached | {source.storage}
        if not (self.runs_again or self.offloads):
            kept = kept | self._held() | self._retained
        return working_sets(self._operations, self._sizes, out=out, kept=kept)

    def saves(self, value: Value) -> bool:
        """Whether the storage of `value` is kept."""
        return value.storage in self._held()

    def recomputed(self) -> Terms:
        """What checkpointed functions save when they run again, and nothing else keeps."""
        again = {storage for node in self._nodes for storage in node.saved}
        return self._by_term(again - self._held())

    def _held(self, num_nodes: int | None = None, *, again: int | None = None) -> set[int]:
        """What the first nodes (None: all) keep; also those of the function that runs again."""
        held: set[int] = set()
        for node in self._nodes[:num_nodes]:
            if node.region is None:
                held |= frozenset() if self.offloads else node.saved
            elif node.region == again:
                held |= self._regions[again].held | node.saved
            elif node.saved:
                held |= self._regions[node.region].held
        return held

    def on_host(self) -> Size:
        """What waits in host memory."""
        if not self.offloads:
            return ZERO
        active = {node.region for node in self._nodes if node.region is not None and node.saved}
        regions = (value for index in active for value in self._regions[index].moved)
        nodes = (
            value for node in self._nodes if node.region is None for value in self._moved(node)
        )
        return total(value.size for value in (*nodes, *regions))

    def _by_term(self, storages: set[int]) -> Terms:
        terms: Terms = {}
        for storage in sorted(storages):
            size = self._sizes[storage]
            if size != ZERO:
                term = self._terms[storage]
                terms[term] = terms.get(term, ZERO).plus(size)
        return terms

    def walk(self, out: Value) -> tuple[list[Moment], Size]:
        """Walk backwards from the gradient of `out`.

        Returns:
            The moments that are largest at some shape, and the bytes of the parameters' gradients.
        """
        walk = Walk(self._nodes, self._regions, self._added_apart, out, offloads=self.offloads)
        moments: list[Moment] = []
        savers = [index for index, node in enumerate(self._nodes) if node.saved]
        runs_again_at = max(savers, default=None) if self.runs_again else None
        for index in range(len(self._nodes) - 1, -1, -1):
            settled = walk.parameter_gradients
            region = walk.starts(index)
            if region is not None or index == runs_again_at:
                moments += self._recomputing(out, index, region, walk.flowing())
            flowing = walk.step(index)
            if flowing is not None:
                saved = self._by_term(self._apart(walk.saved_at(index)))
                if runs_again_at is not None and index > runs_again_at:
                    saved = {}
                if self.offloads:
                    saved = merged(saved, self._brought_back(index))
                moments.append(self._moment(saved, flowing, settled))
            for adding, beside in walk.sums:
                saved = self._by_term(self._apart(walk.saved_at(index, has_run=True)))
                moments.append(self._moment(saved, adding, beside))
        return undominated(moments), walk.parameter_gradients

    def crowded(self, out: Value) -> list[Moment]:
        """Moments of the first forward pass with tensors beside what is recorded (`beside`)."""
        if self.runs_again:
            return []
        retained: set[int] = set()
        found: list[Moment] = []
        for operation, live, beside in running(self._operations, out=out):
            retained |= live & self._retained
            if beside != ZERO:
                before = total(self._sizes[storage] for storage in retained)
                moment = self._running(operation, live, beside, flowing=before, again=None)
                found.append(moment)
        return undominated(found)

    def _recomputing(
        self, out: Value, index: int, region: int | None, flowing: Size
    ) -> Iterator[Moment]:
        """Moments of running again for node `index`, the last one that saves anything.

        All of it, or a checkpointed function, runs. It ends when the last tensor is saved: inputs
        are before the operation has made its output (`set_checkpoint_early_stop`).
        """
        for operation, live, beside in running(self._operations, out=out):
            is_last = operation.num_nodes > index
            if is_last and operation.out not in operation.saved:
                live, beside = live - {operation.out.storage}, ZERO
            if operation.region == region:
                yield self._running(operation, live, beside, flowing=flowing, again=region)
            if is_last:
                return

    def _running(
        self,
        operation: Operation,
        live: frozenset[int],
        beside: Size,
        *,
        flowing: Size,
        again: int | None,
    ) -> Moment:
        """An operation that runs forward: what has been kept by then, and what is alive besides."""
        held = self._held(operation.num_nodes, again=again)
        counted = held if self.runs_again else held | self._retained
        passing = total(self._sizes[storage] for storage in live - counted)
        return self._moment(
            self._by_term(self._apart(held)), total((flowing, passing, beside)), ZERO
        )

    def _brought_back(self, index: int) -> Terms:
        """The copies that a node gets back from host memory."""
        node = self._nodes[index]
        if node.region is not None:
            return {}
        back = [{self._kind_of(value): value.size} for value in self._moved(node)]
        return merged(*back)

    def _moved(self, node: Node) -> Iterator[Value]:
        """What a node saves, but for what it has as plain attributes."""
        return (value for value in node.values if value.storage not in self._retained)

    def _kind_of(self, value: Value) -> Term:
        term = self._terms[value.storage]
        return Term.SAVED_ACTIVATIONS if term is Term.WEIGHTS else term

    def _moment(self, saved: Terms, flowing: Size, settled: Size) -> Moment:
        terms = dict(saved)
        terms[Term.ACTIVATION_GRADIENTS] = flowing
        if settled != ZERO:
            terms[Term.UNSHARDED_GRADIENTS] = settled
        return Moment(terms=terms, size=total(terms.values()))
