"""What the caching allocator's pools hold, against replays of the dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.memory import Instant, Term, estimate_step
from src.memory.columns import answer
from src.memory.parts import parts_of
from src.memory.pools import LARGEST_HOLE, Pools
from src.memory.size import Shape
from src.spec import Checkpointing, Job, Method, Optimizer, Step
from tests.jobs import LORA, step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"))


def pools(step: Step) -> Pools:
    return answer(step.job, step.method, step.layout, step.gpu).pools


def pooled(step: Step) -> float:
    shape = Shape.of(step.micro_batch, step.job.seq_len)
    return pools(step).at(shape, estimate_step(step).ledger)


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_pools_hold_at_least_the_peak(method: Method, checkpointing: Checkpointing) -> None:
    job = replace(JOB, checkpointing=checkpointing)
    step = step_of(job, method, gpus=1 if method is Method.SINGLE else 4)
    assert pooled(step) >= estimate_step(step).peak_bytes.allocated


def test_a_block_at_work_is_stranded_where_the_loss_sets_the_peak() -> None:
    """Its tensors are smaller than the logits, which come when they are free."""
    step = step_of(replace(JOB, finetune=LORA), Method.SINGLE, micro_batch=8)
    estimate = estimate_step(step)
    assert estimate.peak_instant is Instant.LOSS_BACKWARD
    shape = Shape.of(8, step.job.seq_len)
    working = max(one.size.at(shape) for one in pools(step).working)
    half = pools(step).half.at(shape)
    stranded = pooled(step) - estimate.peak_bytes.allocated
    assert working > 0.01 * estimate.peak_bytes.allocated
    assert stranded > working + half


def test_states_take_what_the_first_step_has_left_free() -> None:
    """Not one byte beyond the segments that one step needs beside them."""
    step = step_of(replace(JOB, optimizer=Optimizer.ADAMW_FUSED), Method.SINGLE)
    sgd = replace(step, job=replace(step.job, optimizer=Optimizer.SGD))
    states = estimate_step(step).ledger[Instant.OPTIMIZER_STEP]
    more = pooled(step) - pooled(sgd)
    assert 0 < more <= 1.03 * states[Term.OPTIMIZER_STATES]


def test_fsdp_has_pools_of_its_own_for_what_it_gathers_and_reduces() -> None:
    """Root and first block in buffers, with their cast shards; gradients, and the root's uncast."""
    step = step_of(JOB, Method.FSDP, gpus=4)
    counts = parts_of(step.job, step.method, step.layout, step.gpu).counts
    received = 2 * (counts.edges.base + counts.blocks[0].base) * (1 + 1 / 4)
    gradients = 4 * counts.all.trained_shard + 2 * counts.edges.trained_shard
    assert pools(step).streams.sides == pytest.approx(received + gradients, rel=1e-6)


def test_hoppers_workspace_breaks_a_block_of_the_loss_where_no_other_is_as_large() -> None:
    job = Job(model=zoo_model("opt-350m"), finetune=LORA)
    small, hopper = (
        step_of(job, Method.SINGLE, micro_batch=3, sku=sku) for sku in ("a100-80gb", "h100-80gb")
    )
    assert pools(hopper).workspace > LARGEST_HOLE > pools(small).workspace
    full = pools(hopper).full.at(Shape.of(hopper.micro_batch, job.seq_len))
    assert pooled(hopper) - pooled(small) > full


@pytest.mark.parametrize("method", [Method.DDP, Method.FSDP])
def test_more_sequences_never_hold_less(method: Method) -> None:
    """Past 2,048 tokens one block of this model's fp32 logits serves the table's gradient."""
    steps = [step_of(JOB, method, gpus=4, micro_batch=batch) for batch in range(1, 13)]
    held = [estimate_step(step).peak_bytes.reserved for step in steps]
    assert held == sorted(held)
    assert steps[0].job.seq_len < pools(steps[0]).turns[0] < steps[-1].job.seq_len * 12
