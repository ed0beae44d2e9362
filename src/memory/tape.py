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

Terms = dict[Term, Size]


def merged(*parts: Terms) -> Terms:
    """Terms added up."""
    terms: Terms = {}
    for part in parts:
        for term, size in part.items():
            terms[term] = terms[term].plus(size) if term in terms else size
    return terms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Value:
    """A tensor of the forward pass.

    Attributes:
        size: bytes of the tensor and of its gradient.
        width: elements per token on this GPU (0 for parameters).
        dtype_bytes: bytes per element.
        share: the part of the full width that this GPU holds (1 / tp inside a split region).
        storage: index of its storage; views share one.
        requires_grad: whether a gradient flows into it.
        is_parameter: whether that gradient stays.
        accumulates: whether a parameter's gradient exists already, and this one is added to it.
    """

    size: Size
    width: float
    dtype_bytes: int
    share: float
    storage: int
    requires_grad: bool = True
    is_parameter: bool = False
    accumulates: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    out: Value
    inputs: tuple[Value, ...]
    saved: frozenset[int]
    passed: frozenset[Value]
    is_part: bool
    temporary: Size
    region: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Live bytes at one moment of a walk, by term; without what outlives the walk."""

    terms: Terms
    size: Size


@dataclass
class Tape:
    """Records nodes, then walks them backwards.

    Attributes:
        runs_again: whether the nodes are those of a recomputation: then what they retain is that of
            the first forward pass, other tensors than those that they save.
        token_share: the part of the micro batch's tokens that new tensors are of.
    """

    runs_again: bool = False
    _sizes: list[Size] = field(default_factory=list)
    _terms: list[Term] = field(default_factory=list)
    _nodes: list[_Node] = field(default_factory=list)
    _constants: set[Value] = field(default_factory=set)
    _kept: set[int] = field(default_factory=set)
    _added_apart: set[Value] = field(default_factory=set)
    _regions: list[frozenset[int]] = field(default_factory=list)
    _region: int | None = None
    token_share: float = 1.0
    _retained: set[int] = field(default_factory=set)

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
        """What is recorded within is recomputed in the backward pass, from `inputs`."""
        self._region = len(self._regions)
        self._regions.append(frozenset(value.storage for value in inputs))
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
        differentiable = tuple(value for value in inputs if self.needs_gradient(value))
        if not differentiable:
            self._constants.add(out)
            return
        self._retained.update(value.storage for value in retained)
        self._nodes.append(
            _Node(
                out,
                differentiable,
                frozenset(value.storage for value in saved),
                frozenset(passed),
                is_part,
                temporary,
                self._region,
            )
        )

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

    def saves(self, value: Value) -> bool:
        """Whether the storage of `value` is kept."""
        return value.storage in self._held()

    def recomputed(self) -> Terms:
        """What checkpointed functions save when they run again, and nothing else keeps."""
        again = {storage for node in self._nodes for storage in node.saved}
        return self._by_term(again - self._held())

    def _held(self) -> set[int]:
        held: set[int] = set()
        for node in self._nodes:
            if node.region is None:
                held |= node.saved
            elif node.saved:
                held |= self._regions[node.region]
        return held

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
        walk = _Walk(self._nodes, self._regions, out, frozenset(self._added_apart))
        moments: list[Moment] = []
        for index in range(len(self._nodes) - 1, -1, -1):
            settled = walk.parameter_gradients
            flowing = walk.step(index)
            if flowing is not None:
                moments.append(self._moment(walk.saved_at(index), flowing, settled))
            for adding, beside in walk.sums:
                saved = walk.saved_at(index, has_run=True)
                moments.append(self._moment(saved, adding, beside))
        return undominated(moments), walk.parameter_gradients

    def _moment(self, saved: set[int], flowing: Size, settled: Size) -> Moment:
        terms = self._by_term(self._apart(saved))
        terms[Term.ACTIVATION_GRADIENTS] = flowing
        if settled != ZERO:
            terms[Term.UNSHARDED_GRADIENTS] = settled
        return Moment(terms=terms, size=total(terms.values()))


class _Walk:
    """The engine's state: gradients in flight, and what is still saved."""

    def __init__(
        self,
        nodes: list[_Node],
        regions: list[frozenset[int]],
        out: Value,
        added_apart: frozenset[Value],
    ) -> None:
        self._nodes = nodes
        self._added_apart = added_apart
        self.sums: list[tuple[Size, Size]] = []
        self._first_saver: dict[int, int] = {}
        self._again: list[dict[int, int]] = [{} for _ in regions]
        self._last_saver: dict[int, int] = {}
        for index, node in enumerate(nodes):
            kept = node.saved
            if node.region is not None and node.saved:
                kept = regions[node.region]
                self._last_saver[node.region] = index
                for storage in node.saved:
                    self._again[node.region].setdefault(storage, index)
            for storage in kept:
                self._first_saver.setdefault(storage, index)
        self._first_view: dict[Value, int] = {}
        for index, node in enumerate(nodes):
            if node.is_part:
                self._first_view.setdefault(node.inputs[0], index)
        self._gradient_of: dict[Value, int] = {out: 0}
        self._sizes: dict[int, Size] = {0: out.size}
        self._holders: dict[int, int] = {0: 1}
        self._parts: dict[Value, list[int]] = {}
        self.parameter_gradients = ZERO

    def saved_at(self, index: int, *, has_run: bool = False) -> set[int]:
        """Storages still held while node `index` runs, or once it has."""
        until = index - has_run
        held = {storage for storage, first in self._first_saver.items() if first <= until}
        region = self._nodes[index].region
        if region is not None and index <= self._last_saver.get(region, -1):
            held |= {storage for storage, first in self._again[region].items() if first <= until}
        return held

    def _flowing(self) -> Size:
        return total(self._sizes.values())

    def _release(self, gradient: int) -> None:
        self._holders[gradient] -= 1
        if not self._holders[gradient]:
            del self._sizes[gradient], self._holders[gradient]

    def _allocate(self, size: Size) -> int:
        gradient = max(self._sizes, default=0) + 1
        self._sizes[gradient] = size
        self._holders[gradient] = 1
        return gradient

    def _deliver(self, value: Value, gradient: int) -> None:
        """Hand a gradient to a value: kept for a parameter, added in place to an earlier one."""
        if value.is_parameter:
            if not value.accumulates:
                self.parameter_gradients = self.parameter_gradients.plus(self._sizes[gradient])
            self._release(gradient)
        elif value in self._gradient_of:
            if value in self._added_apart:
                flowing = self._flowing().plus(value.size)
                self.sums.append((flowing, self.parameter_gradients))
            self._release(gradient)
        else:
            self._gradient_of[value] = gradient

    def step(self, index: int) -> Size | None:
        """Run one node; bytes of gradients and temporaries while it runs, None if it does not."""
        node = self._nodes[index]
        self.sums.clear()
        if node.is_part:
            return self._step_part(index, node)
        gradient = self._gradient_of.pop(node.out, None)
        if gradient is None:
            return None
        for value in node.inputs:
            if value in node.passed:
                self._holders[gradient] += 1
        fresh = [
            gradient if value in node.passed else self._allocate(value.size)
            for value in node.inputs
        ]
        peak = self._flowing().plus(node.temporary)
        self._release(gradient)
        for value, delivered in zip(node.inputs, fresh, strict=True):
            self._deliver(value, delivered)
        return peak

    def _step_part(self, index: int, node: _Node) -> Size | None:
        """Gradients of the parts of a split are joined when the last of them has arrived."""
        source = node.inputs[0]
        gradient = self._gradient_of.pop(node.out, None)
        if gradient is not None:
            self._parts.setdefault(source, []).append(gradient)
        if self._first_view[source] != index:
            return None
        whole = self._allocate(source.size)
        peak = self._flowing()
        for part in self._parts.pop(source, []):
            self._release(part)
        self._deliver(source, whole)
        return peak
