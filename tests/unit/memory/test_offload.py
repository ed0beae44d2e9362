"""What waits in host memory, and what the GPU keeps of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.memory import Instant, Term, estimate_step
from src.memory.parts import parts_of
from src.spec import Job, Method, Offload, Optimizer
from tests.jobs import gpu, layout_of, step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"), offload=Offload.ALL)
SHARDED = (Method.FSDP, Method.FSDP_GRAD, Method.HSDP, Method.FSDP_TP)


@pytest.mark.parametrize("method", SHARDED)
def test_fsdp_keeps_no_shard_gradient_or_state_on_the_gpu(method: Method) -> None:
    ledger = estimate_step(step_of(JOB, method, gpus=4)).ledger
    step = ledger[Instant.OPTIMIZER_STEP]
    assert set(step) <= {Term.WEIGHTS, Term.INPUTS, Term.WORKSPACES}
    assert step.get(Term.WEIGHTS, 0) == 0
    assert Term.GRADIENTS not in ledger[Instant.GRADIENT_SYNC]


@pytest.mark.parametrize("method", SHARDED)
def test_the_host_holds_weights_gradients_and_two_states_of_each_shard(method: Method) -> None:
    counts = parts_of(JOB, method, layout_of(method, 4), gpu()).counts.all
    estimate = estimate_step(step_of(JOB, method, gpus=4))
    assert estimate.host_bytes == pytest.approx(16 * counts.base_shard, rel=1e-6)
    foreach = replace(JOB, optimizer=Optimizer.ADAMW)
    copied = estimate_step(step_of(foreach, method, gpus=4))
    assert copied.host_bytes == pytest.approx(20 * counts.base_shard, rel=1e-6)


def test_offloading_takes_what_it_keeps_on_the_host_off_the_gpu() -> None:
    near = estimate_step(step_of(replace(JOB, offload=Offload.NONE), Method.FSDP, gpus=4))
    far = estimate_step(step_of(JOB, Method.FSDP, gpus=4))
    shard = near.ledger[Instant.LOSS_BACKWARD][Term.WEIGHTS]
    states = near.ledger[Instant.LOSS_BACKWARD][Term.OPTIMIZER_STATES]
    saved = sum(near.ledger[Instant.LOSS_BACKWARD].values()) - sum(
        far.ledger[Instant.LOSS_BACKWARD].values()
    )
    assert saved == pytest.approx(shard + states, rel=1e-6)
    assert far.host_bytes >= saved
    assert near.host_bytes == 0


def test_paged_states_are_host_memory() -> None:
    job = Job(model=zoo_model("opt-1.3b"), optimizer=Optimizer.PAGED_ADAMW)
    estimate = estimate_step(step_of(job))
    small = estimate.ledger[Instant.OPTIMIZER_STEP].get(Term.OPTIMIZER_STATES, 0)
    counts = parts_of(job, Method.SINGLE, layout_of(Method.SINGLE, 1), gpu()).counts.all
    assert estimate.host_bytes + small == pytest.approx(8 * counts.base)
    assert small < estimate.host_bytes / 100


@pytest.mark.parametrize("name", ["opt-350m", "gpt2-large", "qwen2.5-0.5b"])
def test_a_single_gpu_fetches_what_the_host_has(name: str) -> None:
    """Each weight is one part, and that lies in host memory: the GPU works on a copy.

    A model of fewer elements than stay whole at once is there in full by the end of the forward
    pass: two bytes for each parameter.
    """
    job = replace(JOB, model=zoo_model(name))
    near = estimate_step(step_of(replace(job, offload=Offload.NONE), Method.ZERO3)).ledger
    far = estimate_step(step_of(job, Method.ZERO3)).ledger
    counts = parts_of(job, Method.ZERO3, layout_of(Method.ZERO3, 1), gpu()).counts.all
    assert far[Instant.LOSS_BACKWARD][Term.GATHERED_WEIGHTS] == 2 * counts.base
    assert far[Instant.LOSS_BACKWARD].get(Term.WEIGHTS, 0) == 0
    assert near[Instant.LOSS_BACKWARD][Term.WEIGHTS] == 2 * counts.base
    assert all(Term.GATHERED_WEIGHTS not in column for column in near.values())
