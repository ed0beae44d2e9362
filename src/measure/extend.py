"""Extend the trace of a few blocks to any number of equal ones.

A trace is cut into segments: what happened while block i ran forward or backward, or concerned the
parameters of block i outside them. Segments of the blocks in order, 0 to n-1 or back, form a chain.
The chain of a deeper model has the same segments at its ends and the middle one repeated; a free
refers to the block that bore the storage by the distance between the two. Whatever does not fit
that shape makes `extend` raise `NotExtensibleError`, and the model is run at its full depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from src.measure.events import Instant
from src.measure.trace import NO_LAYER, Block, Entry

RUN_BLOCKS = 5
"""Blocks that are run: two at each end, and a middle one whose neighbours are alike."""

MIDDLE = RUN_BLOCKS // 2

ItemT = TypeVar("ItemT")


class NotExtensibleError(Exception):
    """The trace is not one of equal blocks in a row."""


class Name(NamedTuple):
    """A storage: the group that bore it, the block within a chain, its number there."""

    group: int
    layer: int
    ordinal: int


@dataclass(slots=True)
class Segment:
    """Consecutive entries of one label."""

    layer: int
    entries: list[Entry]


@dataclass(slots=True)
class Group:
    """One segment, or a whole chain of them."""

    segments: list[Segment]
    is_chain: bool


def template(layer: int, total: int) -> int:
    """The block of the run that stands for block `layer` of `total`."""
    if layer < MIDDLE:
        return layer
    return max(MIDDLE, RUN_BLOCKS - (total - layer))


def expand(items: Sequence[ItemT], layers: Sequence[int], total: int) -> list[ItemT]:
    """Items of the run's blocks (labelled by `layers`, in order) as the deeper model has them."""
    by_layer: dict[int, list[ItemT]] = {}
    for item, layer in zip(items, layers, strict=True):
        by_layer.setdefault(layer, []).append(item)
    out: list[ItemT] = []
    done = False
    for item, layer in zip(items, layers, strict=True):
        if layer == NO_LAYER:
            out.append(item)
        elif not done:
            done = True
            for deep in range(total):
                out += by_layer.get(template(deep, total), [])
    return out


def extend(entries: Sequence[Entry], total: int) -> list[Entry]:
    """The trace of `total` blocks from one of `RUN_BLOCKS`.

    Raises:
        NotExtensibleError: the trace has another shape.
    """
    labelled = _resolve(list(entries))
    groups = list(_groups(list(_segments(labelled))))
    return _Extension(groups, total).run()


def _is_timed(entry: Entry) -> bool:
    return entry.instant not in (Instant.LOAD, Instant.GRADIENT_SYNC, Instant.OPTIMIZER_STEP)


def _resolve(entries: list[Entry]) -> list[Entry]:
    """Every entry with its label; one that names no parameter takes the next one's."""
    following = NO_LAYER
    window: tuple[int, Instant] | None = None
    for entry in reversed(entries):
        if (entry.step, entry.instant) != window:
            window, following = (entry.step, entry.instant), NO_LAYER
        if entry.num_bytes > 0 and entry.layer is None:
            entry.layer = entry.block.layer = following
        elif entry.num_bytes > 0 and entry.layer is not None:
            following = entry.layer
    for entry in entries:
        if entry.num_bytes < 0 and not _is_timed(entry):
            entry.layer = entry.block.layer
    return _sort_frees(entries)


def _sort_frees(entries: list[Entry]) -> list[Entry]:
    """Consecutive frees of storages of every block, in the blocks' order: a chain of their own.

    Such a run inside the first block's stretch of a backward pass is the end of that stretch.
    """
    out: list[Entry] = []
    run: list[Entry] = []
    over: tuple[int, Instant] | None = None
    for entry in entries:
        if run and not _continues(run[-1], entry):
            over = _flush(run, out) or over
        if _is_timed(entry) and over == (entry.step, entry.instant):
            entry.layer = NO_LAYER
        (run if entry.num_bytes < 0 else out).append(entry)
    _flush(run, out)
    return out


def _continues(last: Entry, entry: Entry) -> bool:
    same = last.instant is entry.instant and (last.layer == entry.layer or not _is_timed(entry))
    return entry.num_bytes < 0 and same


def _flush(run: list[Entry], out: list[Entry]) -> tuple[int, Instant] | None:
    """Move `run` to `out`; the window that it ends, if it does."""
    window = None
    if len({entry.block.layer for entry in run} - {NO_LAYER, None}) == RUN_BLOCKS:
        if _is_timed(run[0]) and run[0].layer != NO_LAYER:
            window = (run[0].step, run[0].instant)
        run.sort(key=lambda entry: entry.block.layer or 0)
        for entry in run:
            entry.layer = entry.block.layer
    out.extend(run)
    run.clear()
    return window


def _segments(entries: list[Entry]) -> Iterator[Segment]:
    current: Segment | None = None
    key: tuple[int, object] | None = None
    for entry in entries:
        layer = NO_LAYER if entry.layer is None else entry.layer
        window = "backward" if entry.instant.value.endswith("backward") else entry.instant
        if current is None or current.layer != layer or key != (entry.step, window):
            if current is not None:
                yield current
            current, key = Segment(layer, []), (entry.step, window)
        current.entries.append(entry)
    if current is not None:
        yield current


def _groups(segments: list[Segment]) -> Iterator[Group]:
    upwards = list(range(RUN_BLOCKS))
    index = 0
    while index < len(segments):
        run = [segment.layer for segment in segments[index : index + RUN_BLOCKS]]
        if run in (upwards, upwards[::-1]):
            yield Group(segments[index : index + RUN_BLOCKS], True)
            index += RUN_BLOCKS
        elif segments[index].layer == NO_LAYER or _frees_only(segments[index]):
            yield Group([segments[index]], False)
            index += 1
        else:
            where = segments[index].entries[0]
            raise NotExtensibleError(f"blocks {run} in {where.instant}, step {where.step}")


def _frees_only(segment: Segment) -> bool:
    return all(entry.num_bytes < 0 for entry in segment.entries)


class _Extension:
    """One extension: names of the run's storages, and the storages made so far."""

    def __init__(self, groups: list[Group], total: int) -> None:
        self.groups = groups
        self.total = total
        self.live: dict[Name, Block] = {}
        self.count = 0
        self.out: list[Entry] = []
        self.names: dict[int, Name] = {}
        self._name_all()

    def _name_all(self) -> None:
        """Name every allocation by where it was made, every free by what it frees."""
        current: dict[int, Name] = {}
        for number, group in enumerate(self.groups):
            for segment in group.segments:
                ordinal = 0
                layer = segment.layer if group.is_chain else NO_LAYER
                for entry in segment.entries:
                    if entry.num_bytes > 0:
                        current[id(entry.block)] = Name(number, layer, ordinal)
                        ordinal += 1
                    self.names[id(entry)] = current[id(entry.block)]

    def run(self) -> list[Entry]:
        """The entries of the deeper model."""
        for group in self.groups:
            if not group.is_chain:
                self._emit(group.segments[0], here=None, layer=NO_LAYER)
                continue
            by_layer = {segment.layer: segment for segment in group.segments}
            order = range(self.total)
            for layer in order if group.segments[0].layer == 0 else reversed(order):
                here = template(layer, self.total)
                self._emit(by_layer[here], here=here, layer=layer)
        self._check_leftovers()
        return self.out

    def _emit(self, segment: Segment, *, here: int | None, layer: int) -> None:
        for entry in segment.entries:
            name = self.names[id(entry)]
            if entry.num_bytes > 0:
                self.count += 1
                block = replace(entry.block, number=self.count, num_bytes=0, layer=layer)
                self.live[name._replace(layer=layer)] = block
            else:
                target = name._replace(layer=self._place(name.layer, here, layer))
                found = self.live.pop(target, None)
                if found is None:
                    raise NotExtensibleError(f"nothing to free at {target}")
                block = found
            self.out.append(replace(entry, block=block, layer=layer))

    def _place(self, named: int, here: int | None, layer: int) -> int:
        """The deeper model's block that the run's block `named` is, seen from `here`."""
        if named == NO_LAYER:
            return NO_LAYER
        if here is not None and abs(named - here) <= MIDDLE:
            return layer + named - here
        if named == MIDDLE:
            raise NotExtensibleError("the middle block is freed from afar")
        return named if named < MIDDLE else self.total - RUN_BLOCKS + named

    def _check_leftovers(self) -> None:
        """What lives on in the deeper model has to live on in the run, and the other way round."""
        kept = {self.names[id(e)] for g in self.groups for s in g.segments for e in s.entries}
        freed = {
            self.names[id(e)]
            for g in self.groups
            for s in g.segments
            for e in s.entries
            if e.num_bytes < 0
        }
        kept -= freed
        for name in self.live:
            layer = name.layer
            known = layer if layer == NO_LAYER else template(layer, self.total)
            if name._replace(layer=known) not in kept:
                raise NotExtensibleError(f"{name} is never freed")
