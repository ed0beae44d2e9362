"""A snapshot's peak: which blocks were alive, what was held, and what is no snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from src.errors import UserError
from src.measure.allocator import AllocatorConfig, CachingAllocator
from src.measure.recorded import is_snapshot, read_recorded
from src.measure.snapshot import TraceRecorder, snapshot_dict
from src.units import KIB, MIB


def entry(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def segment(
    address: int, size: int, *blocks: tuple[str, int, int], device: int = 0
) -> dict[str, Any]:
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "stream": 0,
        "blocks": [
            {"state": state, "size": num_bytes, "requested_size": asked, "frames": []}
            for state, num_bytes, asked in blocks
        ],
    }


def snapshot(*trace: dict[str, Any], segments: list[dict[str, Any]]) -> dict[str, Any]:
    return {"device_traces": [list(trace)], "segments": segments}


def test_the_simulated_allocators_own_peak_comes_back() -> None:
    recorder = TraceRecorder()
    allocator = CachingAllocator(observer=recorder)
    recorder.owner = "weights"
    kept = allocator.malloc(3 * MIB)
    recorder.owner = "logits"
    allocator.free(allocator.malloc(64 * MIB))
    recorder.owner = "gradients"
    allocator.malloc(700)
    found = read_recorded(snapshot_dict(events=recorder.events, segments=allocator.segments()))
    assert kept
    assert found.allocated_bytes == allocator.statistics.allocated_bytes.peak == 67 * MIB
    assert found.reserved_bytes == allocator.statistics.reserved_bytes.peak
    assert sorted((held.category, held.num_bytes) for held in found.blocks) == [
        ("logits", 64 * MIB),
        ("weights", 3 * MIB),
    ]
    assert sum(held.num_bytes for held in found.blocks) == found.allocated_bytes
    assert not any(held.is_early for held in found.blocks)


def test_segments_that_grow_and_are_given_back() -> None:
    config = AllocatorConfig(expandable_segments=True)
    recorder = TraceRecorder()
    allocator = CachingAllocator(config=config, observer=recorder)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.empty_cache()
    allocator.malloc(4 * MIB)
    content = snapshot_dict(events=recorder.events, segments=allocator.segments(), config=config)
    found = read_recorded(content)
    assert found.reserved_bytes == allocator.statistics.reserved_bytes.peak
    assert found.allocated_bytes == 50 * MIB
    assert "expandable_segments" in found.settings


def test_blocks_from_before_the_trace_count() -> None:
    freed = entry("free_requested", 0, 1000)
    born = entry("alloc", 2048, 5000, frames=[{"filename": "m.py", "name": "forward", "line": 1}])
    end = segment(
        0, 2 * MIB, ("inactive", 2048, 0), ("active_allocated", 5120, 5000), ("inactive", 1, 0)
    )
    other = segment(4 * MIB, 2 * MIB, ("active_allocated", 4 * KIB, 4 * KIB))
    found = read_recorded(snapshot(born, freed, segments=[end, other]))
    assert found.allocated_bytes == 1024 + 5120 + 4 * KIB
    assert found.reserved_bytes == found.reserved_at_peak_bytes == 4 * MIB
    assert sorted((held.num_bytes, held.is_early) for held in found.blocks) == [
        (1024, True),
        (4 * KIB, True),
        (5120, False),
    ]
    assert next(held for held in found.blocks if not held.is_early).frames == ("m.py:forward",)


def test_without_a_trace_the_dump_is_the_peak() -> None:
    end = segment(0, 2 * MIB, ("active_allocated", 1024, 1000), ("active_pending_free", 512, 512))
    found = read_recorded(snapshot(segments=[end]))
    assert (found.allocated_bytes, found.num_events) == (1024, 0)
    assert found.reserved_bytes == 2 * MIB


def test_the_fullest_gpu_unless_one_is_named() -> None:
    content = {
        "device_traces": [[], [], []],
        "segments": [
            segment(0, 2 * MIB, ("active_allocated", 512, 512), device=0),
            segment(0, 4 * MIB, ("active_allocated", 1024, 1024), device=2),
        ],
    }
    assert (read_recorded(content).device, read_recorded(content).num_devices) == (2, 2)
    assert read_recorded(content, device=0).allocated_bytes == 512
    with pytest.raises(UserError, match=r"GPU 1: GPUs with bytes: 0, 2"):
        read_recorded(content, device=1)


def test_what_failed_is_counted() -> None:
    oom = {"action": "oom", "device_free": 5, "size": 9, "stream": 0}
    found = read_recorded(snapshot(oom, segments=[]))
    assert found.num_ooms == 1


@pytest.mark.parametrize(
    "content",
    [
        {"segments": [], "device_traces": []},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": "x", "size": 1}]]},
        {"segments": [{"device": 0}], "device_traces": []},
        {"segments": 5, "device_traces": []},
        {"segments": [[]], "device_traces": []},
        {"segments": [], "device_traces": [["alloc"]]},
    ],
)
def test_what_is_of_another_form_is_told(content: dict[str, Any]) -> None:
    assert is_snapshot(content)
    with pytest.raises(UserError, match="snapshot=") as caught:
        read_recorded(content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, [], {}, {"segments": []}, "segments device_traces"])
def test_other_content_is_no_snapshot(content: object) -> None:
    assert not is_snapshot(content)
