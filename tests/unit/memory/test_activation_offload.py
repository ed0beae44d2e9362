"""Tensors kept for the backward pass that wait in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.memory import Instant, Term, estimate_step
from src.memory.size import ZERO, Size, per_token
from src.memory.tape import Tape
from src.spec import Checkpointing, Job, Loss, Method, Precision, refusal
from tests.jobs import step_of, zoo_model

LLAMA = Job(model=zoo_model("llama-3.2-1b"), precision=Precision.BF16_TRUE, activation_offload=True)
TOKENS = 4 * 512
D, V, BLOCKS = 2048, 128_256, 16


def test_a_node_gets_its_own_copies_back_the_weight_among_them() -> None:
    tape = Tape(offloads=True)
    source = tape.tensor(10, 2)
    values = [source]
    for width in (20, 5):
        weight = tape.parameter(values[-1].width * width, 2, requires_grad=True)
        out = tape.tensor(width, 2)
        tape.record(out, [values[-1], weight], saved=[values[-1], weight])
        values.append(out)
    assert tape.saved(without=values[-1]) == {}
    assert tape.on_host() == Size(fixed=2 * (200 + 100), per_token=20 + 40)
    moments, _ = tape.walk(values[-1])
    copies = [moment.terms[Term.SAVED_ACTIVATIONS] for moment in moments]
    # the second Linear's or the first one's, never both
    assert set(copies) <= {Size(fixed=200, per_token=40), Size(fixed=400, per_token=20)}


def test_a_tensor_that_two_nodes_save_is_copied_twice() -> None:
    tape = Tape(offloads=True)
    source = tape.tensor(10, 2)
    for _ in range(2):
        tape.record(tape.tensor(10, 2), [source], saved=[source])
    assert tape.on_host() == per_token(40)
    assert Tape().on_host() == ZERO


def test_with_full_checkpointing_block_inputs_move_and_what_the_ends_save() -> None:
    estimate = estimate_step(step_of(LLAMA, micro_batch=4))
    checkpoints = BLOCKS * TOKENS * D * 2
    # the final norm: its input in fp32 twice, its scale twice, and the cast product; the head: its
    # input and its weight; the loss: log-probabilities twice
    norm = TOKENS * (2 * 4 * D + 2 * 4 + 2 * D)
    head = TOKENS * 2 * D + 2 * V * D
    assert estimate.host_bytes == checkpoints + norm + head + 2 * TOKENS * V * 4
    for instant in (Instant.FORWARD_END, Instant.LAST_BLOCK_BACKWARD):
        assert Term.CHECKPOINTS not in estimate.ledger[instant]


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.SELECTIVE])
def test_without_recomputation_every_weight_is_copied_to_the_host_too(
    checkpointing: Checkpointing,
) -> None:
    job = replace(LLAMA, checkpointing=checkpointing, loss=Loss.CHUNKED)
    moved, kept = (
        estimate_step(step_of(replace(job, activation_offload=on), micro_batch=16))
        for on in (True, False)
    )
    assert kept.host_bytes == 0
    assert moved.peak_bytes.allocated < kept.peak_bytes.allocated
    saved = kept.ledger[Instant.FORWARD_END][Term.SAVED_ACTIVATIONS]
    assert moved.host_bytes > saved
    if checkpointing is Checkpointing.NONE:
        blocks = sum(block.num_parameters for block in describe(job.model).blocks)
        assert moved.host_bytes > saved + 0.99 * 2 * blocks


def test_cached_casts_stay_on_the_gpu_through_the_forward_pass() -> None:
    job = replace(LLAMA, precision=Precision.BF16_MIXED, checkpointing=Checkpointing.NONE)
    cells = estimate_step(step_of(job, micro_batch=4)).ledger[Instant.FORWARD_END]
    norms = (2 * BLOCKS + 1) * D
    assert cells[Term.CAST_WEIGHTS] == 2 * (describe(job.model).num_parameters - norms)


def test_tensor_parallelism_offloads_what_is_no_distributed_tensor() -> None:
    assert refusal(LLAMA, Method.TP) is None
    for changed in (
        replace(LLAMA, checkpointing=Checkpointing.NONE),
        replace(LLAMA, checkpoint_every=2),
        replace(LLAMA, sequence_parallel=True),
    ):
        assert refusal(changed, Method.FSDP) is None
        error = refusal(changed, Method.TP)
        assert error is not None
        assert str(error).startswith("activation_offload=true: ")
