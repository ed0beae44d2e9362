"""Recorded traces replayed through the simulated allocator. M is 1 MiB."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import UserError
from src.measure.allocator import (
    AllocatorConfig,
    AllocatorEvent,
    CachingAllocator,
    TraceAction,
    recorded_config,
    replay_snapshot,
)

M = 1024**2


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    place = "device_free" if action == "oom" else "addr"
    return {"action": action, place: address, "size": size, "stream": stream, "frames": []}


def freed(address: int, size: int, stream: int = 0) -> list[dict[str, Any]]:
    return [
        entry("free_requested", address, size, stream),
        entry("free_completed", address, size, stream),
    ]


def segment(address: int, total: int, *blocks: tuple[int, str], stream: int = 0) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "stream": stream,
        "blocks": [
            {"size": size, "requested_size": size, "state": state} for size, state in blocks
        ],
    }


def snapshot(trace: list[dict[str, Any]], *segments: dict[str, Any]) -> dict[str, Any]:
    return {"device_traces": [trace], "segments": list(segments)}


def test_a_step_that_is_recorded_whole() -> None:
    # 30M, then 12M from a new segment, 30M freed and taken again by 29M: 42M reserved in both.
    trace = [
        entry("segment_alloc", 1000, 30 * M),
        entry("alloc", 1000, 30 * M),
        entry("segment_alloc", 5000, 12 * M),
        entry("alloc", 5000, 12 * M),
        *freed(1000, 30 * M),
        entry("alloc", 1000, 29 * M),
        entry("snapshot", 0, 0),
    ]
    report = replay_snapshot(
        snapshot(
            trace,
            segment(1000, 30 * M, (30 * M, "active_allocated")),
            segment(5000, 12 * M, (12 * M, "active_allocated")),
        )
    )
    assert report.num_events == 8
    assert report.num_preloaded == report.num_recorded_ooms == report.num_simulated_ooms == 0
    assert report.recorded_peak_bytes == report.simulated_peak_bytes == 42 * M
    assert report.recorded_end_bytes == report.simulated_end_bytes == 42 * M
    assert report.largest_gap_bytes == 0
    assert report.peak_ratio == 1
    # 29M in a segment of 30M leave 1M, which is not split off.
    assert report.statistics.allocated_bytes.current == 42 * M


def test_a_recording_that_disagrees_shows_the_gap() -> None:
    # The recording took 40M for 30M; the simulation takes 30M.
    trace = [entry("segment_alloc", 1000, 40 * M), entry("alloc", 1000, 30 * M)]
    report = replay_snapshot(
        snapshot(trace, segment(1000, 40 * M, (30 * M, "active_allocated"), (10 * M, "inactive")))
    )
    assert (report.largest_gap_bytes, report.largest_gap_event) == (-10 * M, 1)
    assert report.peak_ratio == 0.75


def test_blocks_from_before_the_trace_are_there() -> None:
    # 16M were freed and 24M are alive that the trace never allocated: 40M + 12M of the trace. The
    # recording began with 16M + 24M, its end of 52M less the segment of 12M.
    trace = [
        entry("segment_alloc", 9000, 12 * M),
        entry("alloc", 9000, 12 * M),
        *freed(1000, 16 * M),
    ]
    report = replay_snapshot(
        snapshot(
            trace,
            segment(1000, 16 * M, (16 * M, "inactive")),
            segment(5000, 24 * M, (24 * M, "active_allocated")),
            segment(9000, 12 * M, (12 * M, "active_allocated")),
        )
    )
    assert report.num_preloaded == 2
    assert report.recorded_peak_bytes == report.simulated_peak_bytes == 52 * M
    assert report.statistics.allocated_bytes.current == 36 * M


def test_a_delayed_free_is_delayed_as_long() -> None:
    # 12M wait while 12M more are asked for: two segments. Without the delay one would do.
    allocation = [
        entry("segment_alloc", 1000, 12 * M),
        entry("alloc", 1000, 12 * M),
        entry("free_requested", 1000, 12 * M),
    ]
    after = [
        entry("segment_alloc", 5000, 12 * M),
        entry("alloc", 5000, 12 * M),
        entry("free_completed", 1000, 12 * M),
        entry("alloc", 1000, 12 * M),
    ]
    report = replay_snapshot(snapshot(allocation + after))
    assert report.simulated_peak_bytes == 24 * M
    assert report.statistics.active_bytes.current == 24 * M
    # Requested before the trace began: completed within it.
    report = replay_snapshot(snapshot([entry("free_completed", 1000, 12 * M)]))
    assert report.num_preloaded == 1
    assert report.statistics.active_bytes.current == 0


def full_then_smaller(*, is_for_room: bool) -> dict[str, Any]:
    growth = [entry("segment_alloc", 5000, 80 * M), entry("alloc", 5000, 80 * M)]
    reuse = [entry("segment_alloc", 9000, 12 * M), entry("alloc", 9000, 12 * M)]
    return snapshot(
        [
            entry("segment_alloc", 1000, 60 * M),
            entry("alloc", 1000, 60 * M),
            *freed(1000, 60 * M),
            entry("segment_free", 1000, 60 * M),
            *(growth if is_for_room else [*freed(0, 1), *reuse]),
        ],
        segment(5000, 80 * M, (80 * M, "active_allocated"))
        if is_for_room
        else segment(9000, 12 * M, (12 * M, "active_allocated")),
    )


def test_given_back_memory_is_given_back_here() -> None:
    # Without a capacity every release is followed: 60M go, then 80M come; the peak is 80M.
    report = replay_snapshot(full_then_smaller(is_for_room=True))
    assert report.simulated_peak_bytes == report.recorded_peak_bytes == 80 * M
    assert report.statistics.num_alloc_retries == 0
    # With 100M the simulation finds by itself that 60M have to go.
    report = replay_snapshot(full_then_smaller(is_for_room=True), capacity_bytes=100 * M)
    assert report.simulated_peak_bytes == 80 * M
    assert report.largest_gap_bytes == 0
    assert report.statistics.num_alloc_retries == 1
    # With 200M it does not, and keeps 140M.
    report = replay_snapshot(full_then_smaller(is_for_room=True), capacity_bytes=200 * M)
    assert report.simulated_peak_bytes == 140 * M
    # What is given back for nothing was an empty_cache by the program.
    report = replay_snapshot(full_then_smaller(is_for_room=False), capacity_bytes=200 * M)
    assert report.simulated_end_bytes == 12 * M + 2 * M  # 2M: the preloaded byte's segment


def test_out_of_memory_in_both() -> None:
    trace = [
        entry("segment_alloc", 1000, 60 * M),
        entry("alloc", 1000, 60 * M),
        entry("oom", 40 * M, 50 * M),
    ]
    recording = snapshot(trace, segment(1000, 60 * M, (60 * M, "active_allocated")))
    report = replay_snapshot(recording, capacity_bytes=100 * M)
    assert (report.num_recorded_ooms, report.num_simulated_ooms) == (1, 1)
    # A smaller card fails earlier: the 60M, too. Their free is then no event.
    trace.extend(freed(1000, 60 * M))
    recording = snapshot(trace, segment(1000, 60 * M, (60 * M, "inactive")))
    report = replay_snapshot(recording, capacity_bytes=45 * M)
    assert (report.num_recorded_ooms, report.num_simulated_ooms) == (1, 2)


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:40"])
def test_its_own_trace_replays_to_the_same_bytes(text: str) -> None:
    config = AllocatorConfig.parse(text)
    trace: list[dict[str, Any]] = []

    def observe(event: AllocatorEvent) -> None:
        trace.append(entry(event.action.value, event.address, event.size, event.stream))

    allocator = CachingAllocator(config=config, observer=observe)
    live: list[int] = []
    for index in range(400):
        live.append(allocator.malloc(1 + index * 7919 * 512 % (24 * M), stream=index % 2))
        if index % 3:
            address = live.pop(index * 31 % len(live))
            if index % 5 == 0:
                allocator.record_stream(address, stream=9)
            allocator.free(address)
        if index % 50 == 0:
            allocator.synchronize()
        if index == 200:
            allocator.empty_cache()
    segments = [segment(state.address, state.size) for state in allocator.segments()]
    report = replay_snapshot(snapshot(trace, *segments), config=config)
    assert report.num_preloaded == 0
    assert report.largest_gap_bytes == 0
    assert report.simulated_peak_bytes == allocator.statistics.reserved_bytes.peak
    assert report.statistics.allocated_bytes == allocator.statistics.allocated_bytes
    assert TraceAction.OOM not in [recorded["action"] for recorded in trace]


def test_options_come_from_the_recording() -> None:
    recording = snapshot([])
    assert recorded_config(recording) == AllocatorConfig()
    recording["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert recorded_config(recording) == AllocatorConfig(expandable_segments=True)
    recording["device_traces"][0] = [entry("segment_map", 0, 20 * M), entry("alloc", 0, 12 * M)]
    assert replay_snapshot(recording).simulated_peak_bytes == 20 * M


def test_other_devices_are_left_out() -> None:
    recording = snapshot([], segment(1000, 12 * M, (12 * M, "active_allocated")))
    report = replay_snapshot(recording, device=1)
    assert (report.num_events, report.recorded_end_bytes, report.peak_ratio) == (0, 0, 1)


@pytest.mark.parametrize(
    "recording",
    [
        {},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [["alloc"]]},
        {"segments": [{"device": 0}], "device_traces": [[]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": "x"}]]},
        {"segments": [], "device_traces": None},
    ],
)
def test_what_is_no_snapshot_is_refused(recording: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not of the form that torch"):
        replay_snapshot(recording)
