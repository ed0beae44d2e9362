"""Memory snapshots for PyTorch's memory viewer (pytorch.org/memory_viz).

The format is that of `torch.cuda.memory._dump_snapshot`: a pickle of plain dicts, lists, strings
and numbers. This module only writes it; nothing here loads a pickle.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.measure.allocator import (
    AllocatorConfig,
    AllocatorEvent,
    BlockState,
    BlockStatus,
    SegmentState,
    TraceAction,
)

_PICKLE_PROTOCOL = 4
"""The viewer reads protocols 2 to 4."""

_NO_OWNER = "unknown"
"""The viewer's own name for what has no category; it fails where categories lack it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A line of the stack that the viewer shows for a block."""

    name: str
    filename: str = ""
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One event of the allocator.

    Attributes:
        time_us: microseconds since any start.
        action: what happened.
        address: of the block or segment; for `oom` the bytes that the device had free.
        size: bytes asked for by the caller (blocks), or of the segment or mapped range.
        stream: stream of the block or segment.
        owner: kind of the block's bytes ("weights", "gradients"); gives its colour and its first
            frame. A free may leave it empty: it takes what the allocation said.
        label: what it is in particular (a module, a parameter); the second frame.
        frames: more frames, innermost first.
    """

    time_us: int
    action: TraceAction
    address: int
    size: int
    stream: int = 0
    owner: str = ""
    label: str = ""
    frames: tuple[Frame, ...] = ()


class TraceRecorder:
    """An observer for `CachingAllocator` that keeps its events, each with owner and time.

    Attributes:
        events: in order.
        time_us: time of the next event; every event moves it on by one.
        owner: owner of the blocks that are allocated from now on.
        label: their label.
        frames: their frames.
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.time_us = 0
        self.owner = ""
        self.label = ""
        self.frames: tuple[Frame, ...] = ()

    def __call__(self, event: AllocatorEvent) -> None:
        """Keep one event."""
        is_owned = event.action is TraceAction.ALLOC
        self.events.append(
            TraceEvent(
                time_us=self.time_us,
                action=event.action,
                address=event.address,
                size=event.size,
                stream=event.stream,
                owner=self.owner if is_owned else "",
                label=self.label if is_owned else "",
                frames=self.frames if is_owned else (),
            )
        )
        self.time_us += 1


def snapshot_dict(
    *,
    events: Iterable[TraceEvent],
    segments: Sequence[SegmentState],
    config: AllocatorConfig | None = None,
) -> dict[str, Any]:
    """The snapshot of one GPU as plain data, as `torch.cuda.memory._snapshot()` would give it.

    Args:
        events: the trace in order, from an empty allocator on.
        segments: the state after the last event (`CachingAllocator.segments`).
        config: the allocator's options.
    """
    writer = _Writer()
    trace = [writer.entry(event) for event in events]
    active = sum(
        block.size
        for segment in segments
        for block in segment.blocks
        if block.status is not BlockStatus.INACTIVE
    )
    last_us = trace[-1]["time_us"] if trace else 0
    trace.append(
        {
            "action": "snapshot",
            "addr": 0,
            "size": active,
            "stream": 0,
            "time_us": last_us,
            "category": _NO_OWNER,
            "frames": writer.no_frames,
        }
    )
    return {
        "segments": [writer.segment(segment) for segment in segments],
        "device_traces": [trace],
        "allocator_settings": _settings(config or AllocatorConfig()),
        "external_annotations": [],
    }


def write_snapshot(
    path: str | Path,
    *,
    events: Iterable[TraceEvent],
    segments: Sequence[SegmentState],
    config: AllocatorConfig | None = None,
    key: str = "snapshot",
) -> None:
    """Write a snapshot file that PyTorch's memory viewer opens; all of it, or nothing.

    Args:
        path: the file, replaced if it exists.
        events: as `snapshot_dict` takes them.
        segments: as `snapshot_dict` takes them.
        config: as `snapshot_dict` takes it.
        key: the option that names the file, for errors.

    Raises:
        UserError: the folder does not exist or the file cannot be written.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise UserError(key=key, value=path, allowed=f"there is no folder {target.parent}")
    data = pickle.dumps(
        snapshot_dict(events=events, segments=segments, config=config),
        protocol=_PICKLE_PROTOCOL,
    )
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            draft.write_bytes(data)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(key=key, value=path, allowed=f"cannot be written: {reason}") from error


class _Writer:
    """Turns events and segments into entries; blocks with the same stack share one list."""

    def __init__(self) -> None:
        self.no_frames: list[dict[str, Any]] = []
        self._owners: dict[int, TraceEvent] = {}
        self._frames: dict[tuple[str, str, tuple[Frame, ...]], list[dict[str, Any]]] = {}

    def entry(self, event: TraceEvent) -> dict[str, Any]:
        """One entry of the trace."""
        source = event
        if event.action is TraceAction.ALLOC:
            self._owners[event.address] = event
        elif event.action in (TraceAction.FREE_REQUESTED, TraceAction.FREE_COMPLETED):
            source = self._owners.get(event.address, event)
        if event.action is TraceAction.FREE_COMPLETED:
            self._owners.pop(event.address, None)
        place = "device_free" if event.action is TraceAction.OOM else "addr"
        return {
            "action": event.action.value,
            place: event.address,
            "size": event.size,
            "stream": event.stream,
            "time_us": event.time_us,
            "category": source.owner or _NO_OWNER,
            "frames": self._stack(source),
        }

    def segment(self, segment: SegmentState) -> dict[str, Any]:
        """One segment with its blocks."""
        blocks = [self._block(block) for block in segment.blocks]
        active = [b for b in segment.blocks if b.status is not BlockStatus.INACTIVE]
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": sum(b.size for b in active if b.status is BlockStatus.ALLOCATED),
            "active_size": sum(b.size for b in active),
            "requested_size": sum(b.requested_bytes for b in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": [0, 0],
            "is_expandable": segment.is_expandable,
            "frames": self.no_frames,
            "blocks": blocks,
        }

    def _block(self, block: BlockState) -> dict[str, Any]:
        owner = self._owners.get(block.address)
        is_owned = owner is not None and block.status is not BlockStatus.INACTIVE
        return {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested_bytes,
            "state": block.status.value,
            "frames": self._stack(owner) if owner is not None and is_owned else self.no_frames,
        }

    def _stack(self, event: TraceEvent) -> list[dict[str, Any]]:
        key = (event.owner, event.label, event.frames)
        found = self._frames.get(key)
        if found is None:
            named = [
                Frame(name=name, filename=filename)
                for name, filename in ((event.owner, "owner"), (event.label, "label"))
                if name
            ]
            found = self._frames[key] = [
                {"name": frame.name, "filename": frame.filename, "line": frame.line}
                for frame in (*named, *event.frames)
            ]
        return found


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    """`allocator_settings` of a snapshot."""
    limit = config.max_split_size_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text(),
        "max_split_size": -1 if limit is None else limit,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << interval): divisions
            for interval, divisions in enumerate(config.roundup_power2_divisions or (0,) * 16)
        },
    }
