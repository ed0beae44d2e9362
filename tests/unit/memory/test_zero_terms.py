"""DeepSpeed's terms by hand, on OPT-125M: T trained elements, its tied table the largest tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from src.architecture import describe
from src.memory import Instant, Term, estimate_step, ledger_of
from src.memory.parts import parts_of
from src.memory.placement import Bf16Placement, ZeroPlacement
from src.memory.placement.partitions import (
    EMBEDDINGS,
    pinned_bytes,
    placed_tensors,
    prefetched,
    reductions,
    rounded_up,
    shares,
)
from src.spec import Finetune, Job, Method, Offload, Optimizer, Precision, ZeroBuffers
from tests.jobs import LORA, gpu, layout_of, step_of, zoo_model

MODEL = zoo_model("opt-125m")
DECODER = describe(MODEL)
T = 125_239_296
TABLE = 50_272 * 768
BUCKET = 500_000_000
JOB = Job(model=MODEL)
TWELVE = (Method.ZERO1, Method.ZERO2)


def cells(method: Method, instant: Instant, gpus: int = 4, **keys: Any) -> dict[Term, int]:
    return dict(ledger_of(step_of(replace(JOB, **keys), method, gpus=gpus))[instant])


def placement(method: Method, gpus: int = 4, **keys: Any) -> ZeroPlacement:
    job = replace(JOB, **keys)
    found = parts_of(job, method, layout_of(method, gpus), gpu()).placement
    assert isinstance(found, ZeroPlacement)
    return found


def host(method: Method, **keys: Any) -> float:
    return placement(method, **keys).host().fixed


def zero(**keys: Any) -> dict[str, ZeroBuffers]:
    return {"zero": ZeroBuffers(**keys)}


def test_tensors_are_those_of_the_model_in_its_order() -> None:
    placed = placed_tensors(DECODER, Finetune())
    assert sum(tensor.numel for tensor in placed) == DECODER.num_parameters == T
    assert [placed[0].block, placed[0].numel] == [EMBEDDINGS, TABLE]
    assert [tensor.block for tensor in placed] == sorted(tensor.block for tensor in placed)
    assert all(tensor.trained for tensor in placed)
    adapters = [tensor for tensor in placed_tensors(DECODER, LORA) if tensor.trained]
    assert {tensor.block for tensor in adapters} == set(range(12))


def test_runs_are_equal_and_gradients_of_a_cut_tensor_whole() -> None:
    four = shares(DECODER, Finetune(), 4)
    assert {share.elements for share in four} == {T // 4}
    # The table is longer than the first run and reaches into the second.
    assert (four[0].sizes, four[0].largest) == ((TABLE,), T // 4)
    assert four[1].sizes[0] == TABLE
    assert four[1].whole > TABLE
    assert sum(share.whole for share in four) > T


def test_a_run_is_padded_to_two_elements() -> None:
    eleven = shares(DECODER, Finetune(), 11)
    assert eleven[0].elements == rounded_up(T, 22) // 11 > T / 11


def test_the_bucket_is_emptied_when_the_next_gradient_does_not_fit() -> None:
    (only,) = reductions(DECODER, Finetune(), 4, BUCKET, backward=True)
    assert (only.block, only.elements, only.owners, only.after) == (EMBEDDINGS, T, 4, 0)
    many = reductions(DECODER, Finetune(), 4, 20_000_000, backward=True)
    assert sum(one.elements for one in many) == T
    assert all(one.elements <= 20_000_000 for one in many[:-1])
    # The table does not fit at all: it comes last, alone.
    assert (many[-1].elements, many[-1].tensors) == (TABLE, 1)
    assert [one.after for one in many] == [
        sum(other.elements for other in many[:index]) for index in range(len(many))
    ]
    blocks = [one.block for one in many]
    assert blocks == sorted(blocks, reverse=True)


def test_gathered_groups_reach_the_prefetch_size() -> None:
    placed = placed_tensors(DECODER, Finetune())
    groups = list(prefetched(placed, 10_000_000))
    assert [len(group) for group in groups[:1]] == [1]
    assert all(sum(one.numel for one in group) >= 10_000_000 for group in groups[:-1])
    assert [one for group in groups for one in group] == list(placed)


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (5, 8), (1 << 30, 1 << 30)])
def test_page_locked_memory_is_a_power_of_two(asked: int, taken: int) -> None:
    assert pinned_bytes(asked) == taken


def test_the_loss_does_not_meet_the_bucket_but_the_first_gradient_does() -> None:
    for method in TWELVE:
        assert Term.COMMUNICATION_BUFFERS not in cells(method, Instant.FORWARD_END)
        found = cells(method, Instant.LOSS_BACKWARD)
        waiting = found.get(Term.GRADIENTS, 0) + found.get(Term.UNSHARDED_GRADIENTS, 0)
        assert found[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET
        assert waiting == pytest.approx(2 * TABLE, rel=1e-3)


def test_stage_one_keeps_its_bucket_and_its_gradients_between_micro_steps() -> None:
    found = cells(Method.ZERO1, Instant.FORWARD_END, grad_accum=2)
    assert found[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET
    assert found[Term.GRADIENTS] == 2 * T
    two = cells(Method.ZERO2, Instant.FORWARD_END, grad_accum=2)
    fullest = max(share.whole for share in shares(DECODER, Finetune(), 4))
    assert Term.COMMUNICATION_BUFFERS not in two
    assert two[Term.GRADIENTS] == 2 * fullest


def test_gradients_are_reduced_from_a_copy_of_the_bucket() -> None:
    found = cells(Method.ZERO2, Instant.GRADIENT_SYNC)
    assert found[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET + 2 * T
    in_fp32 = cells(Method.ZERO2, Instant.GRADIENT_SYNC, fp32_reduce=True)
    assert in_fp32[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET + 6 * T
    alone = cells(Method.ZERO2, Instant.GRADIENT_SYNC, gpus=1)
    assert alone[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET
    assert alone[Term.GRADIENTS] == 2 * T


@pytest.mark.parametrize("method", TWELVE)
def test_before_the_optimizer_gradients_are_there_three_times(method: Method) -> None:
    """SGD keeps nothing and needs nothing: averaged, flattened and in fp32, or the fp64 norm."""
    found = cells(method, Instant.OPTIMIZER_STEP, optimizer=Optimizer.SGD)
    four = shares(DECODER, Finetune(), 4)
    norm = max(2 * share.whole + 8 * share.largest for share in four)
    joined = 2 * max(share.whole for share in four) + 6 * T // 4
    assert found[Term.GRADIENTS] + found[Term.OPTIMIZER_TEMPORARIES] == max(norm, joined)


def test_foreach_adamw_runs_beside_all_gradients_while_a_second_group_waits() -> None:
    fullest = 2 * max(share.whole for share in shares(DECODER, Finetune(), 4))
    fused, foreach = (
        placement(Method.ZERO2, optimizer=optimizer).steps()[-1]
        for optimizer in (Optimizer.ADAMW_FUSED, Optimizer.ADAMW)
    )
    assert fused[Term.GRADIENTS].fixed == foreach[Term.GRADIENTS].fixed == fullest
    assert fused[Term.OPTIMIZER_TEMPORARIES].fixed == 4 * T // 4
    assert foreach[Term.OPTIMIZER_TEMPORARIES].fixed == 8 * T // 4
    adapters = placement(Method.ZERO2, finetune=LORA, optimizer=Optimizer.ADAMW).steps()[-1]
    assert set(adapters) == {Term.OPTIMIZER_TEMPORARIES}


def test_fp32_gradients_of_stage_two_are_a_flat_partition() -> None:
    found = cells(Method.ZERO2, Instant.GRADIENT_SYNC, **zero(fp32_gradients=True))
    largest = max(share.largest for share in shares(DECODER, Finetune(), 4))
    assert found[Term.GRADIENTS] == 4 * T // 4
    assert found[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET + 2 * T + 4 * largest


def test_fp32_gradients_of_stage_one_in_bf16_are_whole_all_the_time() -> None:
    assert isinstance(placement(Method.ZERO1, **zero(fp32_gradients=True)), Bf16Placement)
    for instant in list(Instant)[1:]:
        found = cells(Method.ZERO1, instant, **zero(fp32_gradients=True))
        kept = found.get(Term.UNSHARDED_GRADIENTS, 0)
        assert kept == pytest.approx(4 * T, abs=2 * TABLE + 2 * 768)
    sync = cells(Method.ZERO1, Instant.GRADIENT_SYNC, **zero(fp32_gradients=True))
    assert sync[Term.GRADIENTS] == 2 * T
    assert sync[Term.COMMUNICATION_BUFFERS] == max(4 * TABLE, 2 * T)


def test_fp32_gradients_of_stage_one_in_fp16_are_whole_and_so_is_the_bucket() -> None:
    found = placement(
        Method.ZERO1, precision=Precision.FP16_MIXED, **zero(fp32_gradients=True)
    ).backward_buffers()
    assert found[Term.COMMUNICATION_BUFFERS].fixed == 4 * BUCKET


def test_stage_three_reads_its_own_part_where_that_is_the_whole() -> None:
    found = cells(Method.ZERO3, Instant.LOSS_BACKWARD, gpus=1)
    assert Term.GATHERED_WEIGHTS not in found
    assert found[Term.WEIGHTS] == 2 * T


def test_stage_three_keeps_a_small_model_whole_from_forward_to_backward() -> None:
    found = placement(Method.ZERO3)
    assert found.gathered_loss().fixed == 2 * T
    moments = dict(found.gathered_moments())  # type: ignore[attr-defined]
    groups = prefetched(found.fetched, 50_000_000)  # type: ignore[attr-defined]
    largest = max(sum(one.numel for one in group) for group in groups if len(group) > 1)
    assert max(size.fixed for size in moments.values()) == 2 * (T + largest)
    assert found.gathered_backward(11).fixed == 2 * T
    edges = found.gathered_edges().fixed
    assert found.gathered_backward(0).fixed - edges < 2 * (T - TABLE) / 10
    assert edges == pytest.approx(2 * (TABLE + 2050 * 768), rel=0.02)


def test_the_overflow_check_of_fp16_copies_the_gradients() -> None:
    bf16, fp16 = (
        [
            one[Term.OPTIMIZER_TEMPORARIES].fixed
            for one in placement(Method.ZERO3, precision=p).steps()
        ]
        for p in (Precision.BF16_MIXED, Precision.FP16_MIXED)
    )
    assert len(fp16) == len(bf16) + 1
    assert fp16[-1] == pytest.approx(3 * T / 4, rel=1e-5)


@pytest.mark.parametrize("method", TWELVE)
def test_offloaded_states_leave_weights_and_one_tensor(method: Method) -> None:
    keys = {"offload": Offload.OPTIMIZER}
    found = cells(method, Instant.OPTIMIZER_STEP, **keys)
    assert found[Term.WEIGHTS] == 2 * T
    assert found[Term.COMMUNICATION_BUFFERS] == 2 * TABLE
    assert {Term.MASTER_WEIGHTS, Term.OPTIMIZER_STATES, Term.GRADIENTS}.isdisjoint(found)
    pinned = [4 * T / 4, 4 * T / 4, 2 * T / 4, 2 * TABLE]
    assert host(method, **keys) == sum(map(pinned_bytes, pinned)) + 8 * T / 4


def test_offloaded_stage_three_keeps_parts_of_weights_and_the_bucket() -> None:
    keys = {"offload": Offload.OPTIMIZER}
    found = cells(Method.ZERO3, Instant.OPTIMIZER_STEP, **keys)
    assert found[Term.WEIGHTS] == pytest.approx(2 * T / 4, rel=1e-5)
    assert found[Term.COMMUNICATION_BUFFERS] == 2 * BUCKET
    t = placement(Method.ZERO3).partition
    own = pinned_bytes(4 * t) + pinned_bytes(2 * t) + 4 * t + 8 * t
    assert host(Method.ZERO3, **keys) == own + 2 * t
    whole = {"offload": Offload.ALL}
    assert Term.WEIGHTS not in cells(Method.ZERO3, Instant.OPTIMIZER_STEP, **whole)
    assert host(Method.ZERO3, **whole) == own + pinned_bytes(2 * t)


def test_what_is_not_offloaded_needs_no_host() -> None:
    for method in (*TWELVE, Method.ZERO3):
        assert estimate_step(step_of(JOB, method, gpus=4)).host_bytes == 0
        step = step_of(replace(JOB, offload=Offload.OPTIMIZER), method, gpus=4)
        assert estimate_step(step).host_bytes > 16 * T / 4


def test_a_frozen_linear_of_stage_three_keeps_its_input() -> None:
    keys: dict[str, Any] = {"finetune": LORA}
    two, three = (
        cells(method, Instant.LAST_BLOCK_BACKWARD, **keys)[Term.SAVED_ACTIVATIONS]
        for method in (Method.ZERO2, Method.ZERO3)
    )
    assert three > two
