"""Where weights, gradients and states lie: bytes per parameter of each method."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.memory import Instant, Term, ledger_of
from src.memory.counts import Counts
from src.memory.parts import Parts, parts_of
from src.spec import Job, Layout, Method, Optimizer, Precision, ZeroBuffers
from tests.jobs import LORA, gpu, layout_of, step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"))
LAYERS = 24
STATES = (Term.WEIGHTS, Term.MASTER_WEIGHTS, Term.GRADIENTS, Term.OPTIMIZER_STATES)


def parts(job: Job, method: Method, gpus: int = 4) -> Parts:
    return parts_of(job, method, layout_of(method, gpus), gpu())


def everything(job: Job, method: Method, gpus: int = 4) -> Counts:
    return parts(job, method, gpus).counts.all


def per_parameter(job: Job, method: Method, gpus: int = 4) -> dict[Term, float]:
    """Bytes per parameter of the whole model in the optimizer's step."""
    cells = ledger_of(step_of(job, method, gpus=gpus))[Instant.OPTIMIZER_STEP]
    count = everything(JOB, Method.SINGLE, 1).base
    return {
        term: cells[term] / count for term in (*STATES, Term.OPTIMIZER_TEMPORARIES) if term in cells
    }


def near(**expected: float) -> object:
    return pytest.approx({Term[name.upper()]: value for name, value in expected.items()}, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "stored"), [("bf16-mixed", 4), ("bf16-true", 2), ("fp16-mixed", 4), ("fp32", 4)]
)
@pytest.mark.parametrize("method", [Method.SINGLE, Method.DDP])
def test_whole_states_have_the_dtype_of_the_weights(
    precision: str, stored: int, method: Method
) -> None:
    job = replace(JOB, precision=Precision(precision))
    gpus = 1 if method is Method.SINGLE else 4
    assert per_parameter(job, method, gpus) == near(
        weights=stored, gradients=stored, optimizer_states=2 * stored
    )


@pytest.mark.parametrize(
    ("optimizer", "states", "copy"),
    [("adamw", 8, 4), ("adamw-fused", 8, None), ("sgd", None, None), ("sgd-momentum", 4, None)],
)
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_states_and_temporaries_of_each_optimizer(
    optimizer: str, states: int | None, copy: int | None, shards: int
) -> None:
    method = Method.SINGLE if shards == 1 else Method.FSDP
    found = per_parameter(replace(JOB, optimizer=Optimizer(optimizer)), method, shards)
    whole = {
        Term.WEIGHTS: 4,
        Term.GRADIENTS: 4,
        Term.OPTIMIZER_STATES: states,
        Term.OPTIMIZER_TEMPORARIES: copy,
    }
    assert found == pytest.approx(
        {term: bytes_ / shards for term, bytes_ in whole.items() if bytes_ is not None}, rel=0.01
    )


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_deepspeed_in_half_precision_keeps_an_fp32_partition(shards: int) -> None:
    n = shards
    one = per_parameter(JOB, Method.ZERO1, n)
    # The tensors at both ends of a run are whole: at most two of the 103M of the embedding.
    assert 2 / n <= one.pop(Term.GRADIENTS) <= 2 / n + 2 * 103e6 / 1316e6
    assert one == near(
        weights=2, master_weights=4 / n, optimizer_states=8 / n, optimizer_temporaries=6 / n
    )
    assert per_parameter(JOB, Method.ZERO2, n) == per_parameter(JOB, Method.ZERO1, n)
    three = per_parameter(JOB, Method.ZERO3, n)
    assert three[Term.WEIGHTS] == pytest.approx(2 / n, rel=0.01)
    assert three[Term.OPTIMIZER_STATES] == pytest.approx(8 / n, rel=0.01)


@pytest.mark.parametrize("method", [Method.ZERO1, Method.ZERO2])
def test_stages_differ_in_the_gradients_they_keep_through_backward(method: Method) -> None:
    cells = ledger_of(step_of(JOB, method, gpus=4))[Instant.FIRST_BLOCK_BACKWARD]
    whole = 2 * everything(JOB, method).base
    fullest = 2 * max(share.whole for share in parts(JOB, method).placement.shares)
    kept = whole if method is Method.ZERO1 else fullest
    assert cells[Term.GRADIENTS] == pytest.approx(kept, abs=4096)


def test_small_tensors_stay_whole_in_stage_three() -> None:
    none, all_ = (
        replace(JOB, zero=ZeroBuffers(param_persistence_threshold=threshold))
        for threshold in (0, 10**9)
    )
    count = everything(JOB, Method.ZERO3).base
    placements = [parts(job, Method.ZERO3).placement for job in (none, all_)]
    assert [one.weights() for one in placements] == [2 * count / 4] * 2
    assert [one.persistent for one in placements] == [0, 2 * count]


@pytest.mark.parametrize(
    ("live", "gathered"), [(0, "reused"), (600_000_000, "limit"), (10**10, "all")]
)
def test_stage_three_keeps_whole_weights_up_to_its_limit(live: int, gathered: str) -> None:
    zero = ZeroBuffers(
        max_live_parameters=live, prefetch_bucket_size=0, param_persistence_threshold=0
    )
    mine = parts(replace(JOB, zero=zero), Method.ZERO3)
    table = 50272 * 2048
    elements = {
        "reused": table + (10**9 - 2 * table) // 3,
        "limit": live + 4 * 2048 * 2048,
        "all": mine.counts.all.base,
    }[gathered]
    assert mine.placement.gathered_loss().fixed == 2 * elements


@pytest.mark.parametrize("index", range(LAYERS))
def test_fsdp_gathers_the_root_the_block_and_the_next_one(index: int) -> None:
    mine = parts(JOB, Method.FSDP)
    block, root = 2 * mine.counts.blocks[0].base, 2 * mine.counts.edges.base
    neighbours = 1 if index else 0
    gathered = mine.placement.gathered_backward(index).fixed
    assert gathered == root + block * (1 + neighbours)


def test_fsdp_without_resharding_holds_every_block_that_is_still_to_come() -> None:
    mine = parts(JOB, Method.FSDP_GRAD)
    block, root = 2 * mine.counts.blocks[0].base, 2 * mine.counts.edges.base
    gathered = [mine.placement.gathered_backward(index).fixed for index in range(LAYERS)]
    assert gathered == [root + block * (index + 1) for index in range(LAYERS)]
    assert mine.placement.gathered_loss().fixed == root + block * LAYERS


def test_fsdp_reduces_the_root_last_from_a_copy() -> None:
    cells = ledger_of(step_of(JOB, Method.FSDP, gpus=4))[Instant.GRADIENT_SYNC]
    root = 2 * parts(JOB, Method.FSDP).counts.edges.base
    assert cells[Term.COMMUNICATION_BUFFERS] >= root
    assert Term.GATHERED_WEIGHTS not in cells


@pytest.mark.parametrize("method", [Method.DDP, Method.DDP_TP])
def test_buckets_of_ddp_live_from_the_first_forward_pass_on(method: Method) -> None:
    ledger = ledger_of(step_of(JOB, method, gpus=4))
    bytes_ = 4 * everything(JOB, method).trained
    for instant in Instant:
        expected = 0 if instant is Instant.LOAD else bytes_
        assert ledger[instant].get(Term.COMMUNICATION_BUFFERS, 0) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("method", [Method.SINGLE, Method.FSDP])
def test_adapters_and_their_states_are_fp32(precision: Precision, method: Method) -> None:
    job = replace(JOB, precision=precision, finetune=LORA)
    shards = 1 if method is Method.SINGLE else 4
    count = everything(job, method, shards)
    cells = ledger_of(step_of(job, method, gpus=shards))[Instant.OPTIMIZER_STEP]
    trained = count.adapters_shard
    assert cells[Term.OPTIMIZER_STATES] == pytest.approx(8 * trained, abs=1)
    assert cells[Term.GRADIENTS] == pytest.approx(4 * trained, abs=1)
    base = count.base_shard * precision.weight_bytes
    assert cells[Term.WEIGHTS] == pytest.approx(base + 4 * trained, rel=0.001)


@pytest.mark.parametrize(
    ("sku", "bytes_"), [("v100-16gb", 8_519_680), ("a100-80gb", 8_519_680), ("h100-80gb", 32 << 20)]
)
def test_one_workspace_for_each_of_two_streams(sku: str, bytes_: int) -> None:
    ledger = ledger_of(step_of(replace(JOB, precision=Precision.FP16_MIXED), sku=sku))
    for instant in list(Instant)[1:]:
        assert ledger[instant][Term.WORKSPACES] == 2 * bytes_


def test_three_int64_inputs_per_token() -> None:
    ledger = ledger_of(step_of(JOB, micro_batch=3))
    assert {cells.get(Term.INPUTS) for cells in ledger.values()} == {None, 3 * 512 * 3 * 8}


def test_nothing_but_weights_is_there_when_they_are_loaded() -> None:
    ledger = ledger_of(step_of(JOB, micro_batch=3))
    assert set(ledger[Instant.LOAD]) == {Term.WEIGHTS}


def test_a_shard_group_within_the_replicas_is_what_divides() -> None:
    # 4 replicas, states divided by 2 only; reduced gradients that are not cast are nobody else's
    job = replace(JOB, precision=Precision.FP32)
    halves = ledger_of(replace(step_of(job, Method.FSDP, gpus=4), layout=Layout(dp=4, shard=2)))
    two = ledger_of(step_of(job, Method.FSDP, gpus=2))
    assert halves == two
