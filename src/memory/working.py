"""What a forward pass has on the GPU while it runs, besides what it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from src.memory.size import ZERO, Size, fixed, total, undominated

if TYPE_CHECKING:
    from src.memory.values import Value


class Operation(NamedTuple):
    """One operation as it runs forward, whether or not autograd records it.

    Attributes:
        out: its output.
        inputs: what it reads.
        saved: tensors that it makes or reads and that its backward keeps.
        temporary: bytes of its backward's temporaries; those of fixed size are weights that both
            passes dequantise.
        beside: tensors that are alive while it runs forward and that nothing records.
        num_nodes: autograd nodes recorded once it has run.
        region: the checkpointed function that it is part of, if any.
    """

    out: Value
    inputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    temporary: Size
    beside: tuple[Size, ...]
    num_nodes: int
    region: int | None


class Working(NamedTuple):
    """Tensors alive at one moment of a forward pass that nothing keeps.

    Attributes:
        size: bytes of all of them.
        blocks: bytes of each.
    """

    size: Size
    blocks: tuple[Size, ...]


def working_sets(
    operations: Sequence[Operation], sizes: Sequence[Size], *, out: Value, kept: Collection[int]
) -> tuple[Working, ...]:
    """The moments of a forward pass that are largest at some shape.

    A tensor lives from the operation that makes it to the last one that reads it.

    Args:
        operations: in the order in which they run.
        sizes: bytes of each storage.
        out: what the pass gives; alive to its end.
        kept: storages that are counted elsewhere: what is kept, and what comes in.
    """
    last = {
        value.storage: index
        for index, operation in enumerate(operations)
        for value in operation.inputs
    }
    last[out.storage] = len(operations)
    known, live, found = set(kept), dict[int, Size](), list[Working]()
    for index, operation in enumerate(operations):
        for value in (operation.out, *operation.saved):
            if value.storage not in known and sizes[value.storage] != ZERO:
                known.add(value.storage)
                live[value.storage] = sizes[value.storage]
                last.setdefault(value.storage, index)
        blocks = [*live.values(), fixed(operation.temporary.fixed), *operation.beside]
        found.append(Working(total(blocks), tuple(blocks)))
        live = {storage: size for storage, size in live.items() if last[storage] > index}
    return tuple(undominated(found))


def running(
    operations: Sequence[Operation], *, out: Value
) -> Iterator[tuple[Operation, frozenset[int], Size]]:
    """Operations of a forward pass, one after the other.

    Yields:
        Each, the storages alive while it runs (kept or not), and the bytes of what is beside them.
    """
    last = {
        value.storage: index
        for index, operation in enumerate(operations)
        for value in (operation.out, *operation.saved, *operation.inputs)
    }
    last[out.storage] = len(operations)
    live: set[int] = set()
    for index, operation in enumerate(operations):
        live |= {value.storage for value in (operation.out, *operation.saved, *operation.inputs)}
        yield operation, frozenset(live), total(operation.beside)
        live = {storage for storage in live if last[storage] > index}
