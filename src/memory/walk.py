"""The autograd engine's walk over a tape: gradients in flight, and what is still saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from src.memory.size import ZERO, Size, total

if TYPE_CHECKING:
    from src.memory.values import Value


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One autograd node; `saved` are the storages of the `values` that it keeps.

    Attributes:
        region: the checkpointed function that it is part of, if any.
    """

    out: Value
    inputs: tuple[Value, ...]
    saved: frozenset[int]
    passed: frozenset[Value]
    is_part: bool
    temporary: Size
    region: int | None
    values: tuple[Value, ...]


class Region(NamedTuple):
    """Inputs of a checkpointed function: storages kept on the GPU, tensors moved to the host."""

    held: frozenset[int]
    moved: tuple[Value, ...]


class Walk:
    """The engine's state: gradients in flight, and what is still saved."""

    def __init__(
        self,
        nodes: list[Node],
        regions: list[Region],
        added_apart: set[Value],
        out: Value,
        *,
        offloads: bool,
    ) -> None:
        self._nodes = nodes
        self._added_apart = added_apart
        self.sums: list[tuple[Size, Size]] = []
        self._first_saver: dict[int, int] = {}
        self._again: list[dict[int, int]] = [{} for _ in regions]
        self._last_saver: dict[int, int] = {}
        for index, node in enumerate(nodes):
            kept = frozenset() if offloads else node.saved
            if node.region is not None and node.saved:
                kept = regions[node.region].held
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

    def starts(self, index: int) -> int | None:
        """The checkpointed function that has to run again before node `index` does, if any."""
        region = self._nodes[index].region
        return region if region is not None and self._last_saver.get(region) == index else None

    def flowing(self) -> Size:
        """Bytes of the gradients in flight."""
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
                flowing = self.flowing().plus(value.size)
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
        peak = self.flowing().plus(node.temporary)
        self._release(gradient)
        for value, delivered in zip(node.inputs, fresh, strict=True):
            self._deliver(value, delivered)
        return peak

    def _step_part(self, index: int, node: Node) -> Size | None:
        """Gradients of the parts of a split are joined when the last of them has arrived."""
        source = node.inputs[0]
        gradient = self._gradient_of.pop(node.out, None)
        if gradient is not None:
            self._parts.setdefault(source, []).append(gradient)
        if self._first_view[source] != index:
            return None
        whole = self._allocate(source.size)
        peak = self.flowing()
        for part in self._parts.pop(source, []):
            self._release(part)
        self._deliver(source, whole)
        return peak
