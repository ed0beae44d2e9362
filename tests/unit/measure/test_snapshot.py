"""Snapshots for PyTorch's memory viewer. M is 1 MiB."""

from __future__ import annotations

import base64
import json
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.measure.allocator import (
    AllocatorConfig,
    BlockState,
    BlockStatus,
    CachingAllocator,
    SegmentState,
    SimulatedOomError,
    TraceAction,
    replay_snapshot,
)
from src.measure.snapshot import Frame, TraceEvent, TraceRecorder, snapshot_dict, write_snapshot

M = 1024**2

VIEWER_OPCODES = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT"),
    *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1"),
    *("LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""All that the viewer's own reader of pickles knows; none of them imports or calls anything."""


def recorded_step() -> tuple[TraceRecorder, CachingAllocator]:
    """Weights of 3M stay, 5M of activations are freed, 2M of gradients wait for stream 1."""
    recorder = TraceRecorder()
    allocator = CachingAllocator(observer=recorder)
    recorder.owner, recorder.label = "weights", "model.embed"
    allocator.malloc(3 * M)
    recorder.owner, recorder.label = "activations", ""
    recorder.frames = (Frame(name="forward", filename="model.py", line=7),)
    activation = allocator.malloc(5 * M)
    recorder.owner, recorder.frames = "gradients", ()
    gradient = allocator.malloc(2 * M - 1)
    allocator.record_stream(gradient, stream=1)
    allocator.free(gradient)
    allocator.free(activation)
    return recorder, allocator


def written(path: Path, **options: Any) -> Path:
    recorder, allocator = recorded_step()
    write_snapshot(path, events=recorder.events, segments=allocator.segments(), **options)
    return path


def test_the_trace_names_owners() -> None:
    recorder, allocator = recorded_step()
    data = snapshot_dict(events=recorder.events, segments=allocator.segments())
    (trace,) = data["device_traces"]
    assert [(e["action"], e["category"], e["size"], e["time_us"]) for e in trace] == [
        ("segment_alloc", "unknown", 20 * M, 0),
        ("alloc", "weights", 3 * M, 1),
        ("alloc", "activations", 5 * M, 2),
        ("alloc", "gradients", 2 * M - 1, 3),
        ("free_requested", "gradients", 2 * M - 1, 4),
        ("free_requested", "activations", 5 * M, 5),
        ("free_completed", "activations", 5 * M, 6),
        ("snapshot", "unknown", 5 * M, 6),
    ]
    assert trace[1]["frames"] == [
        {"name": "weights", "filename": "owner", "line": 0},
        {"name": "model.embed", "filename": "label", "line": 0},
    ]
    assert trace[2]["frames"] == [
        {"name": "activations", "filename": "owner", "line": 0},
        {"name": "forward", "filename": "model.py", "line": 7},
    ]
    assert trace[6]["frames"] == trace[2]["frames"]


def test_the_segments_have_states_and_sums() -> None:
    recorder, allocator = recorded_step()
    data = snapshot_dict(events=recorder.events, segments=allocator.segments())
    (segment,) = data["segments"]
    assert [(b["size"], b["requested_size"], b["state"]) for b in segment["blocks"]] == [
        (3 * M, 3 * M, "active_allocated"),
        (5 * M, 0, "inactive"),
        (2 * M, 2 * M - 1, "active_pending_free"),
        (10 * M, 0, "inactive"),
    ]
    assert segment["blocks"][2]["frames"] == [{"name": "gradients", "filename": "owner", "line": 0}]
    assert segment["blocks"][1]["frames"] == []
    assert segment["total_size"] == 20 * M
    assert segment["allocated_size"] == 3 * M
    assert segment["active_size"] == 5 * M
    assert segment["requested_size"] == 5 * M - 1
    assert (segment["segment_type"], segment["is_expandable"]) == ("large", False)


def test_an_out_of_memory_entry_has_what_was_free() -> None:
    recorder = TraceRecorder()
    allocator = CachingAllocator(capacity_bytes=30 * M, observer=recorder)
    with pytest.raises(SimulatedOomError):
        allocator.malloc(40 * M)
    data = snapshot_dict(events=recorder.events, segments=allocator.segments())
    (entry, _) = data["device_traces"][0]
    assert (entry["action"], entry["device_free"], entry["size"]) == ("oom", 30 * M, 40 * M)
    assert "addr" not in entry


def test_events_can_be_made_by_hand() -> None:
    events = [
        TraceEvent(time_us=5, action=TraceAction.SEGMENT_MAP, address=0, size=20 * M, stream=3),
        TraceEvent(time_us=6, action=TraceAction.ALLOC, address=0, size=M + 1, owner="states"),
    ]
    used = BlockState(address=0, size=M + 512, requested_bytes=M + 1, status=BlockStatus.ALLOCATED)
    segment = SegmentState(
        address=0, size=M + 512, stream=3, is_small=False, is_expandable=True, blocks=(used,)
    )
    data = snapshot_dict(events=events, segments=[segment])
    assert data["device_traces"][0][0]["stream"] == 3
    assert data["segments"][0]["is_expandable"] is True
    assert data["segments"][0]["blocks"][0]["frames"][0]["name"] == "states"


def test_the_file_holds_plain_data_only(tmp_path: Path) -> None:
    path = written(tmp_path / "step.pickle")
    opcodes = list(pickletools.genops(path.read_bytes()))
    assert {opcode.name for opcode, _, _ in opcodes} <= VIEWER_OPCODES
    assert next(argument for opcode, argument, _ in opcodes if opcode.name == "PROTO") == 4
    strings = {argument for _, argument, _ in opcodes if isinstance(argument, str)}
    assert {"segments", "device_traces", "weights", "activations", "gradients"} <= strings
    assert [p.name for p in tmp_path.iterdir()] == ["step.pickle"]


def test_the_viewer_takes_it() -> None:
    """PyTorch's own functions over the same data; the plots embed it as the viewer gets it."""
    viz = pytest.importorskip("torch.cuda._memory_viz")
    recorder, allocator = recorded_step()
    data = snapshot_dict(events=recorder.events, segments=allocator.segments())
    lines = viz.trace(data).splitlines()
    assert lines[0] == "Device 0 ----------------"
    assert "a = cudaMalloc" in lines[2]
    assert lines[3:6] == ["b = a[0:3.0MiB]", "c = a[3145728:5.0MiB]", "d = a[8388608:2.0MiB]"]
    assert "segments: 1\ntotal_reserved: 20.0MiB\ntotal_allocated: 3.0MiB" in viz.segsum(data)
    flames = viz.memory(data, format_flamegraph=str)
    assert "stream_0;active_allocated;label:0:model.embed;owner:0:weights 3145728" in flames
    for page in (viz.trace_plot(data), viz.segment_plot(data)):
        match = re.search(r"const local_files = (.*)", page)
        assert match is not None
        (file,) = json.loads(match[1])
        assert b"gradients" in base64.b64decode(file["base64"])


def test_its_own_snapshot_replays() -> None:
    config = AllocatorConfig(expandable_segments=True)
    recorder = TraceRecorder()
    allocator = CachingAllocator(config=config, observer=recorder)
    for size in (30, 5, 12):
        allocator.free(allocator.malloc(size * M))
    data = snapshot_dict(events=recorder.events, segments=allocator.segments(), config=config)
    report = replay_snapshot(json.loads(json.dumps(data)))
    assert report.recorded_peak_bytes == report.simulated_peak_bytes == 40 * M
    assert report.largest_gap_bytes == 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "opt-1.3b"
    path.write_bytes(b"old")
    with pytest.raises(AttributeError):
        write_snapshot(path, events=[None], segments=[])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    written(path)
    assert path.read_bytes() != b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["opt-1.3b"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        written(tmp_path / "no" / "step.pickle", key="timeline")
    assert str(caught.value) == (
        f"timeline={tmp_path}/no/step.pickle: there is no folder {tmp_path}/no"
    )


def test_a_path_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "step.pickle").mkdir()
    with pytest.raises(UserError, match=r"^snapshot=.*step\.pickle: cannot be written: Is a dir"):
        written(tmp_path / "step.pickle")
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        written(tmp_path / ("x" * 300))
    assert [p.name for p in tmp_path.iterdir()] == ["step.pickle"]
