"""Traces of a few blocks extended to many, on traces written by hand."""

from __future__ import annotations

import pytest

from src.measure.events import Instant, Owner
from src.measure.extend import RUN_BLOCKS, NotExtensibleError, expand, extend, template
from src.measure.trace import NO_LAYER, Block, Entry


def hand_made(depth: int, *, leak_to_last: bool = False) -> list[Entry]:
    """Forward: each block keeps 100 + 1 bytes. Backward: frees them, leaves a gradient of 10."""
    entries: list[Entry] = []
    count = 0

    def born(num_bytes: int, instant: Instant, layer: int) -> Block:
        nonlocal count
        count += 1
        block = Block(count, 0, 0, Owner.TEMPORARIES, False, 0, layer=layer)
        entries.append(Entry(block, num_bytes, instant, 2, layer))
        return block

    def freed(block: Block, num_bytes: int, instant: Instant, layer: int) -> None:
        entries.append(Entry(block, -num_bytes, instant, 2, layer))

    head = born(7, Instant.FORWARD_END, NO_LAYER)
    kept = []
    previous = None
    for layer in range(depth):
        kept.append((born(100, Instant.FORWARD_END, layer), born(1, Instant.FORWARD_END, layer)))
        if previous is not None:
            freed(previous, 1, Instant.FORWARD_END, layer)
        previous = kept[-1][1]
    assert previous is not None
    freed(previous, 1, Instant.FORWARD_END, NO_LAYER)
    for layer in reversed(range(depth)):
        instant = Instant.MIDDLE_BLOCK_BACKWARD
        if layer in (0, depth - 1):
            instant = Instant.FIRST_BLOCK_BACKWARD if layer == 0 else Instant.LAST_BLOCK_BACKWARD
        born(10, instant, layer)
        target = kept[0] if leak_to_last and layer == depth // 2 else kept[layer]
        if not (leak_to_last and layer == 0):
            freed(target[0], 100, instant, layer)
    freed(head, 7, Instant.GRADIENT_SYNC, NO_LAYER)
    return entries


def shape(entries: list[Entry]) -> list[tuple[int, Instant, int | None]]:
    return [(entry.num_bytes, entry.instant, entry.layer) for entry in entries]


@pytest.mark.parametrize("depth", [5, 6, 7, 12, 80])
def test_the_extension_is_the_deeper_trace(depth: int) -> None:
    assert shape(extend(hand_made(RUN_BLOCKS), depth)) == shape(hand_made(depth))


def test_a_trace_of_another_shape_is_refused() -> None:
    with pytest.raises(NotExtensibleError):
        extend(hand_made(RUN_BLOCKS, leak_to_last=True), 12)
    with pytest.raises(NotExtensibleError):
        extend(hand_made(4), 12)


def test_both_ends_keep_their_blocks() -> None:
    assert [template(layer, 9) for layer in range(9)] == [0, 1, 2, 2, 2, 2, 2, 3, 4]
    assert [template(layer, 5) for layer in range(5)] == [0, 1, 2, 3, 4]


def test_items_of_the_middle_block_are_repeated() -> None:
    items = ["embedding", *(f"block{i}" for i in range(5)), "head"]
    layers = [NO_LAYER, 0, 1, 2, 3, 4, NO_LAYER]
    assert expand(items, layers, 7) == [
        "embedding", "block0", "block1", "block2", "block2", "block2", "block3", "block4", "head",
    ]  # fmt: skip
