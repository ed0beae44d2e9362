"""Blocks that another stream uses, and what exists only while weights arrive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from src.measure.allocator import CachingAllocator
from src.measure.case import parse_case
from src.measure.dry_run import dry_run
from src.measure.events import Event, Instant, Owner
from src.measure.loading import transient_bytes
from src.measure.quantised import Linear4bit, Linear8bitLt
from src.measure.stream_use import StreamUse
from src.units import MIB

UNIT_BYTES = 40 * MIB
TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def gather(block: int, *, step: int = 1) -> Event:
    return Event(
        block=block,
        num_bytes=UNIT_BYTES,
        stream=1,
        instant=Instant.FORWARD_END,
        owner=Owner.GATHERED_WEIGHTS,
        step=step,
    )


def free(block: int, *, used_by: tuple[int, ...] = (0,)) -> Event:
    return Event(
        block=block,
        num_bytes=0,
        stream=1,
        instant=Instant.FORWARD_END,
        owner=Owner.GATHERED_WEIGHTS,
        step=1,
        used_by=used_by,
    )


def reserved(events: list[Event]) -> int:
    allocator = CachingAllocator()
    replay = StreamUse(allocator)
    for event in events:
        replay.apply(event)
    return allocator.statistics.reserved_bytes.peak


def in_turn(count: int, **of_free: tuple[int, ...]) -> list[Event]:
    return [e for block in range(count) for e in (gather(block), free(block, **of_free))]


def test_units_gathered_in_turn_take_the_bytes_of_two() -> None:
    assert reserved(in_turn(6)) == 2 * UNIT_BYTES


def test_without_the_other_stream_they_take_the_bytes_of_one() -> None:
    assert reserved(in_turn(6, used_by=())) == UNIT_BYTES


def test_one_that_was_gathered_ahead_makes_three() -> None:
    ahead = [gather(0)]
    for block in range(1, 6):
        ahead += [gather(block), free(block - 1)]
    assert reserved(ahead) == 3 * UNIT_BYTES


def test_the_end_of_a_step_frees_everything() -> None:
    assert reserved([gather(0), free(0), gather(1, step=2)]) == UNIT_BYTES


@pytest.mark.parametrize("fsdp1", [True, False])
def test_only_fsdp1_records_streams(fsdp1: bool) -> None:
    case = {
        "model": {"name": "tiny", "config": TINY},
        "method": "fsdp",
        "layout": {"dp": 2, "shard": 2},
        "seq_len": 128,
        "loop": {"fsdp1": fsdp1},
    }
    events = dry_run(parse_case(case)).events
    assert any(event.used_by for event in events) is fsdp1
    assert not any(event.used_by for event in events if event.num_bytes)
    arrivals = [e for e in events if not e.step and e.owner is Owner.TEMPORARIES]
    assert bool(arrivals) is fsdp1


def test_a_unit_arrives_whole_and_is_concatenated() -> None:
    flat = nn.Parameter(torch.empty(5, dtype=torch.bfloat16, device="meta"))
    flat._shapes = ((2, 3), (4,))  # type: ignore[attr-defined]
    assert transient_bytes(nn.Identity(), flat) == [12, 8, 20]


def test_a_quantised_weight_arrives_in_half_precision() -> None:
    nested = Linear4bit(128, 64, bias=False)
    assert transient_bytes(nested, None) == [128 * 64 * 2, 128 * 64 // 64 * 4]
    plain = Linear4bit(128, 64, bias=False, compress_statistics=False)
    assert transient_bytes(plain, None) == [128 * 64 * 2, 0]
    assert transient_bytes(Linear8bitLt(128, 64), None) == [128 * 64 * 2]
    assert transient_bytes(nn.Linear(128, 64, device="meta"), None) == []
