"""A dry run over time, from events made by hand. M is 1 MiB."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.measure import timeline as module
from src.measure.events import Event, Instant, Owner
from src.measure.snapshot import snapshot_dict
from src.measure.timeline import MOST_MOMENTS, Timeline, timeline, write_trace

M = 1024**2


def event(
    block: int, num_bytes: int, instant: Instant, owner: Owner, *, step: int = 2, stream: int = 0
) -> Event:
    return Event(
        block=block, num_bytes=num_bytes, stream=stream, instant=instant, owner=owner, step=step
    )


STEP = (
    event(1, 3 * M, Instant.LOAD, Owner.WEIGHTS, step=0),
    event(2, 2 * M, Instant.OPTIMIZER_STEP, Owner.OPTIMIZER_STATES, step=1),
    event(3, M - 1, Instant.FORWARD_END, Owner.SAVED_ACTIVATIONS),
    event(4, 1, Instant.LOSS_BACKWARD, Owner.LOGITS, stream=1),
    event(3, 0, Instant.LOSS_BACKWARD, Owner.SAVED_ACTIVATIONS),
    event(4, 0, Instant.GRADIENT_SYNC, Owner.LOGITS),
)


def test_live_bytes_by_owner_in_blocks_of_512() -> None:
    found = timeline(STEP, step=2)
    assert found.owners == (
        Owner.WEIGHTS,
        Owner.OPTIMIZER_STATES,
        Owner.SAVED_ACTIVATIONS,
        Owner.LOGITS,
    )
    assert [(m.index, m.instant, m.num_bytes) for m in found.moments] == [
        (0, Instant.FORWARD_END, (3 * M, 2 * M, M, 0)),
        (1, Instant.LOSS_BACKWARD, (3 * M, 2 * M, M, 512)),
        (2, Instant.LOSS_BACKWARD, (3 * M, 2 * M, 0, 512)),
        (3, Instant.GRADIENT_SYNC, (3 * M, 2 * M, 0, 0)),
    ]


def test_it_survives_json() -> None:
    found = timeline(STEP, step=2)
    assert Timeline.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_long_step_is_thinned_and_keeps_its_peak() -> None:
    events = []
    for block in range(5 * MOST_MOMENTS):
        size = 100 * M if block == 1234 else M
        events.append(event(block, size, Instant.FORWARD_END, Owner.TEMPORARIES))
        events.append(event(block, 0, Instant.FORWARD_END, Owner.TEMPORARIES))
    found = timeline(events, step=2)
    assert len(found.moments) <= 1.2 * MOST_MOMENTS
    assert max(sum(moment.num_bytes) for moment in found.moments) == 100 * M
    indices = [moment.index for moment in found.moments]
    assert indices == sorted(indices)


def test_the_snapshot_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "step.pickle"
    write_trace(path, STEP, capacity_bytes=80 * M, outside_bytes=0)
    opcodes = list(pickletools.genops(path.read_bytes()))
    names = {opcode.name for opcode, _, _ in opcodes}
    calls = ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "EXT1")
    assert names.isdisjoint(calls)
    strings = {argument for _, argument, _ in opcodes if isinstance(argument, str)}
    assert {"weights", "optimizer_states", "forward_end, step 2", "segment_alloc"} <= strings
    assert [file.name for file in tmp_path.iterdir()] == ["step.pickle"]


def test_pytorchs_viewer_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    caught: dict[str, Any] = {}
    monkeypatch.setattr(module, "write_snapshot", lambda _, **parts: caught.update(parts))
    write_trace(tmp_path / "a.pickle", STEP, capacity_bytes=80 * M, outside_bytes=0)
    data = snapshot_dict(**caught)
    assert "alloc" in viz.trace(data)
    assert "Active Memory Timeline" in viz.trace_plot(data)
    assert viz.segsum(data)
    actions = [entry["action"] for entry in data["device_traces"][0]]
    assert actions.count("alloc") == 4
    assert actions.count("free_completed") == 2


def test_what_does_not_fit_ends_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: dict[str, Any] = {}
    monkeypatch.setattr(module, "write_snapshot", lambda _, **parts: caught.update(parts))
    write_trace(tmp_path / "a.pickle", STEP, capacity_bytes=22 * M, outside_bytes=20 * M)
    assert [e.action for e in caught["events"]] == ["oom"]


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"snapshot=.*no folder"):
        write_trace(tmp_path / "no" / "a.pickle", STEP, capacity_bytes=80 * M, outside_bytes=0)
