"""FSDP's reduction of gradients: its dtype, HSDP's second half, and what waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.memory import Instant, Term, ledger_of
from src.memory.parts import Parts, parts_of
from src.spec import Checkpointing, Job, Layout, Method, Optimizer, Precision, Step
from tests.jobs import gpu, zoo_model

BLOCKS, VOCABULARY, HIDDEN = 6, 50304, 1024
JOB = Job(
    model=zoo_model("pythia-410m", num_hidden_layers=BLOCKS),
    precision=Precision.BF16_MIXED,
    checkpointing=Checkpointing.FULL,
    optimizer=Optimizer.SGD,
)
TABLE = VOCABULARY * HIDDEN
NORM = 2 * HIDDEN
ROOT = 2 * TABLE + NORM
"""An embedding, a head of its own and the final norm."""

SHARDED, REPLICATED = Layout(dp=4, shard=4), Layout(dp=8, shard=4)


def parts(job: Job, layout: Layout = SHARDED) -> Parts:
    return parts_of(job, Method.HSDP, layout, gpu())


def sync(job: Job, layout: Layout = SHARDED) -> dict[Term, int]:
    step = Step(job=job, method=Method.HSDP, layout=layout, gpu=gpu(), micro_batch=1)
    return ledger_of(step)[Instant.GRADIENT_SYNC]


def reducing(job: Job) -> Job:
    return replace(job, fp32_reduce=True)


def test_the_root_is_reduced_in_half_precision_and_cast() -> None:
    """Input of every rank's part, output of one's, and the head's whole gradient, still named."""
    cells = sync(JOB)
    assert cells[Term.COMMUNICATION_BUFFERS] == 2 * ROOT + 2 * ROOT // 4
    assert cells[Term.UNSHARDED_GRADIENTS] == 2 * TABLE


def test_in_fp32_the_input_doubles_and_the_output_is_the_gradient() -> None:
    cells = sync(reducing(JOB))
    assert cells[Term.COMMUNICATION_BUFFERS] == 4 * ROOT
    assert cells[Term.UNSHARDED_GRADIENTS] in (2 * TABLE, 2 * ROOT)
    assert sync(replace(JOB, precision=Precision.FP32)) == sync(
        reducing(replace(JOB, precision=Precision.FP32))
    )


@pytest.mark.parametrize("index", [0, 3])
def test_a_block_leaves_its_input_behind_in_the_dtype_of_the_reduction(index: int) -> None:
    block = parts(JOB).counts.blocks[index].base
    for job, bytes_ in ((JOB, 2), (reducing(JOB), 4)):
        left = parts(job).placement.neighbour_buffers(index)
        assert left[Term.COMMUNICATION_BUFFERS].fixed == bytes_ * block


def test_replicas_hold_every_reduced_shard_until_the_end() -> None:
    shard = parts(JOB).counts.blocks_together.base_shard
    assert sync(JOB, REPLICATED)[Term.COMMUNICATION_BUFFERS] == pytest.approx(
        sync(JOB)[Term.COMMUNICATION_BUFFERS] + 2 * shard, abs=1
    )
    held = parts(JOB, REPLICATED).placement.held_reductions(3)
    two = sum(part.base_shard for part in parts(JOB).counts.blocks[4:])
    assert held[Term.COMMUNICATION_BUFFERS].fixed == 2 * two


def test_a_reduced_shard_that_is_not_cast_is_the_gradient_itself() -> None:
    for job in (reducing(JOB), replace(JOB, precision=Precision.BF16_TRUE)):
        assert sync(job, REPLICATED) == sync(job)


@pytest.mark.parametrize(("fp32", "bytes_"), [(False, 2), (True, 4)])
def test_gradients_of_earlier_micro_steps_wait_whole(fp32: bool, bytes_: int) -> None:
    job = replace(JOB, grad_accum=3, fp32_reduce=fp32)
    mine = parts(job)
    waiting = mine.placement.waiting_gradients()[Term.UNSHARDED_GRADIENTS]
    assert waiting.fixed == bytes_ * mine.counts.all.base


def test_in_the_last_micro_step_the_blocks_behind_are_shards() -> None:
    mine = parts(replace(JOB, grad_accum=3))
    block = mine.counts.blocks[0].base
    last, between = mine.placement.waiting_backward(2, NORM + TABLE)
    assert last[Term.UNSHARDED_GRADIENTS].fixed == 2 * (ROOT + 3 * block)
    assert last[Term.GRADIENTS].fixed == 4 * 3 * mine.counts.blocks[0].base_shard
    assert last[Term.COMMUNICATION_BUFFERS].fixed == 2 * block
    assert between == mine.placement.waiting_gradients()


def test_of_two_micro_steps_the_first_makes_what_the_second_adds_to() -> None:
    for fp32, bytes_, made in ((False, 2, 4), (True, 4, 3)):
        mine = parts(replace(JOB, grad_accum=2, fp32_reduce=fp32))
        _, first = mine.placement.waiting_backward(2, NORM + TABLE)
        edges = 0 if fp32 else 2 * (NORM + TABLE)
        blocks = bytes_ * made * mine.counts.blocks[0].base
        assert first[Term.UNSHARDED_GRADIENTS].fixed == blocks + edges
