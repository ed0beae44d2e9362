"""Peaks and ledgers of traces written by hand."""

from __future__ import annotations

from src.measure.events import Instant, Owner
from src.measure.ledger import events, final_owner, rounded, summarize
from src.measure.trace import Block, Entry


def block(owner: Owner = Owner.TEMPORARIES, *, outlived: bool = False) -> Block:
    return Block(0, 0, 0, owner, outlived, 1, outlived=outlived)


def test_blocks_are_rounded_to_512_bytes() -> None:
    assert [rounded(size) for size in (1, 512, 513)] == [512, 512, 1024]


def test_what_outlives_its_forward_stretch_was_saved() -> None:
    assert final_owner(block(outlived=True)) is Owner.SAVED_ACTIVATIONS
    assert final_owner(block()) is Owner.TEMPORARIES
    assert final_owner(block(Owner.GRADIENTS, outlived=True)) is Owner.GRADIENTS


def test_the_peak_is_the_largest_moment_of_the_measured_step() -> None:
    weights, early, kept, late = block(Owner.WEIGHTS), block(), block(outlived=True), block()
    entries = [
        Entry(weights, 1024, Instant.LOAD, 0),
        Entry(early, 10_240, Instant.FORWARD_END, 1),
        Entry(early, -10_240, Instant.FORWARD_END, 1),
        Entry(kept, 512, Instant.FORWARD_END, 2),
        Entry(late, 2048, Instant.LOSS_BACKWARD, 2),
        Entry(kept, -512, Instant.LOSS_BACKWARD, 2),
        Entry(late, -2048, Instant.LOSS_BACKWARD, 2),
    ]
    result = summarize(entries, step=2, versions={}, notes=())
    assert result.peak_bytes == 1024 + 512 + 2048
    assert result.peak_instant is Instant.LOSS_BACKWARD
    assert result.instant_peaks == {
        Instant.LOAD: 1024,
        Instant.FORWARD_END: 1536,
        Instant.LOSS_BACKWARD: 3584,
    }
    assert result.ledger[Instant.LOSS_BACKWARD] == {
        Owner.WEIGHTS: 1024,
        Owner.SAVED_ACTIVATIONS: 512,
        Owner.TEMPORARIES: 2048,
    }
    assert result.after_step_bytes == 1024


def test_a_window_starts_with_what_is_already_alive() -> None:
    kept = block(Owner.WEIGHTS)
    entries = [
        Entry(kept, 1024, Instant.FORWARD_END, 2),
        Entry(kept, -1024, Instant.OPTIMIZER_STEP, 2),
    ]
    result = summarize(entries, step=2, versions={}, notes=())
    assert result.instant_peaks[Instant.OPTIMIZER_STEP] == 1024


def test_a_resized_storage_is_a_new_block_each_time() -> None:
    gathered = block(Owner.GATHERED_WEIGHTS)
    entries = [Entry(gathered, size, Instant.FORWARD_END, 1) for size in (100, -100, 200, -200)]
    assert [(event.block, event.num_bytes) for event in events(entries)] == [
        (1, 100),
        (1, 0),
        (2, 200),
        (2, 0),
    ]
