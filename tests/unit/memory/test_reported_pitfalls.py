"""What users reported of other estimators and training stacks, asked of this formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.memory import Instant, Term, count_model, estimate_step, ledger_of
from src.memory.parts import parts_of
from src.plan import compare
from src.spec import (
    Checkpointing,
    FinetuneKind,
    Job,
    Layout,
    Method,
    Optimizer,
    Precision,
    Upcast,
    Verdict,
)
from src.units import GIB
from tests.jobs import LORA, gpu, layout_of, step_of, zoo_model
from tests.plan_requests import request_of

METHODS = (Method.ZERO2, Method.ZERO3)
STATES = (Term.WEIGHTS, Term.MASTER_WEIGHTS, Term.OPTIMIZER_STATES, Term.GRADIENTS)


def peak(job: Job, method: Method = Method.SINGLE, **keys) -> int:
    return estimate_step(step_of(job, method, **keys)).peak_bytes.allocated


def test_states_are_not_all_the_memory() -> None:
    """A 7B model over 4 GPUs by ZeRO-3 was estimated at 0.5 GB and took 15 to 21."""
    job = Job(model=zoo_model("llama-2-7b"))
    cells = estimate_step(step_of(job, Method.ZERO3, gpus=4)).ledger
    states = max(sum(column.get(term, 0) for term in STATES) for column in cells.values())
    assert peak(job, Method.ZERO3, gpus=4) > states + 3 * GIB


@pytest.mark.parametrize("gpus", [2, 4, 8, 64])
@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.FP32])
def test_states_shrink_with_each_zero_stage(gpus: int, precision: Precision) -> None:
    job = Job(model=zoo_model("opt-1.3b"), precision=precision)
    kept = []
    for method in (Method.DDP, Method.ZERO1, Method.ZERO2, Method.ZERO3):
        cells = ledger_of(step_of(job, method, gpus=gpus))[Instant.FIRST_BLOCK_BACKWARD]
        kept.append(sum(cells.get(term, 0) for term in STATES))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


@pytest.mark.parametrize("bucket", [1_500_000_000, 2_000_000_000])
@pytest.mark.parametrize("method", [Method.ZERO1, Method.ZERO2, Method.ZERO3])
def test_the_reduce_bucket_is_in_the_peak(bucket: int, method: Method) -> None:
    job = Job(model=zoo_model("opt-1.3b"), optimizer=Optimizer.SGD)
    usual, double = (
        peak(replace(job, zero=replace(job.zero, reduce_bucket_size=size)), method, gpus=4)
        for size in (bucket, 2 * bucket)
    )
    assert double - usual == 2 * bucket


@pytest.mark.parametrize("name", ["opt-125m", "gpt2", "pythia-160m"])
@pytest.mark.parametrize("method", [Method.ZERO1, Method.ZERO2, Method.ZERO3])
def test_a_small_model_on_one_gpu_is_worse_off_with_an_engine(name: str, method: Method) -> None:
    job = Job(model=zoo_model(name))
    assert peak(job, method) > peak(job)


def test_the_last_stage_may_need_more_than_the_one_before() -> None:
    """A 7B model took 52.8 GB by ZeRO-3 and 43.8 GB by ZeRO-2: no order is taken for granted."""
    job = Job(model=zoo_model("opt-1.3b"))
    large = Job(model=zoo_model("llama-2-7b"))
    two, three = (peak(job, method, gpus=4, micro_batch=8) for method in METHODS)
    assert three > two
    assert peak(large, Method.ZERO3, gpus=64) < peak(large, Method.ZERO2, gpus=64)


def test_every_sequence_costs_the_same() -> None:
    job = Job(model=zoo_model("llama-2-7b"), checkpointing=Checkpointing.NONE)
    peaks = [peak(job, Method.ZERO2, gpus=4, micro_batch=batch) for batch in (16, 32, 48)]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], abs=64)
    assert (peaks[1] - peaks[0]) / 16 > 100 * 1024**2


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_weights_go_by_all_experts_and_activations_by_those_a_token_visits(name: str) -> None:
    field = "num_local_experts" if name == "mixtral-8x7b" else "num_experts"
    visits = {"num_experts_per_tok": 2}
    usual, small, busy = (
        Job(
            model=zoo_model(name, **{**visits, **changes}),
            precision=Precision.BF16_TRUE,
            checkpointing=Checkpointing.NONE,
        )
        for changes in ({}, {field: 4}, {"num_experts_per_tok": 4})
    )
    counts = [describe(job.model).num_parameters for job in (usual, small, busy)]
    assert counts[1] < counts[0] == counts[2]
    ends = {
        key: ledger_of(step_of(job, micro_batch=8))[Instant.FORWARD_END]
        for key, job in (("usual", usual), ("small", small), ("busy", busy))
    }
    assert ends["small"][Term.WEIGHTS] < ends["usual"][Term.WEIGHTS]
    saved = {key: cells[Term.SAVED_ACTIVATIONS] for key, cells in ends.items()}
    assert saved["busy"] > 1.2 * saved["usual"]
    assert saved["small"] == pytest.approx(saved["usual"], rel=0.05)


def test_the_experts_width_is_theirs_and_not_the_dense_layers() -> None:
    narrow, wide = (
        describe(zoo_model("qwen3-30b-a3b", moe_intermediate_size=width)).num_parameters
        for width in (384, 768)
    )
    assert wide - narrow == 48 * 128 * 3 * 2048 * 384
    other = zoo_model("qwen3-30b-a3b", intermediate_size=1)
    assert describe(other).num_parameters == wide


def test_gradients_in_bf16_are_half_of_those_in_fp32() -> None:
    job = Job(model=zoo_model("opt-1.3b"))
    count = count_model(describe(job.model), finetune=job.finetune).all.base
    gradients = [
        ledger_of(step_of(replace(job, precision=precision)))[Instant.OPTIMIZER_STEP][
            Term.GRADIENTS
        ]
        for precision in (Precision.BF16_MIXED, Precision.BF16_TRUE)
    ]
    assert gradients[0] - gradients[1] == 2 * count


def test_mixed_keeps_weights_of_twice_the_bytes() -> None:
    job = Job(model=zoo_model("opt-1.3b"))
    mixed, true = (
        ledger_of(step_of(replace(job, precision=precision)))[Instant.LOAD][Term.WEIGHTS]
        for precision in (Precision.BF16_MIXED, Precision.BF16_TRUE)
    )
    assert mixed == 2 * true


@pytest.mark.parametrize("method", [Method.FSDP, Method.FSDP_GRAD])
def test_whole_weights_of_two_blocks_are_in_the_backward_pass(method: Method) -> None:
    job = Job(model=zoo_model("llama-2-7b"))
    block = parts_of(job, method, layout_of(method, 8), gpu()).counts.largest_block.base
    cells = ledger_of(step_of(job, method, gpus=8))[Instant.LAST_BLOCK_BACKWARD]
    assert cells[Term.GATHERED_WEIGHTS] >= 2 * block * 2


def test_fsdp_shards_are_fp32_whatever_they_compute_in() -> None:
    """Llama-3-8B over 4 GPUs: 5 x 4 bytes x P / 4 in the optimizer's step, 40.2 GB."""
    job = Job(model=zoo_model("llama-3-8b"), optimizer=Optimizer.ADAMW)
    cells = ledger_of(step_of(job, Method.FSDP, gpus=4))[Instant.OPTIMIZER_STEP]
    assert sum(cells.values()) == pytest.approx(40.2e9, rel=0.003)


@pytest.mark.parametrize(
    ("precision", "bytes_per_parameter"), [("bf16-true", 10), ("bf16-mixed", 20), ("fp32", 20)]
)
def test_foreach_adamw_steps_with_a_whole_copy(precision: str, bytes_per_parameter: int) -> None:
    job = Job(
        model=zoo_model("opt-1.3b"), precision=Precision(precision), optimizer=Optimizer.ADAMW
    )
    cells = ledger_of(step_of(job))[Instant.OPTIMIZER_STEP]
    count = describe(job.model).num_parameters
    assert sum(cells.values()) == pytest.approx(bytes_per_parameter * count, rel=0.005)


def test_what_fits_with_sgd_may_not_fit_with_adamw() -> None:
    job = Job(model=zoo_model("llama-2-7b"), precision=Precision.BF16_TRUE, finetune=LORA)
    full = replace(job, finetune=replace(LORA, kind=FinetuneKind.FULL))
    sgd, adamw = (
        peak(replace(full, optimizer=optimizer)) for optimizer in (Optimizer.SGD, Optimizer.ADAMW)
    )
    assert adamw - sgd > 6 * describe(full.model).num_parameters * 0.9


def test_an_a10_is_no_a100() -> None:
    small, large = (
        compare(request_of("opt-1.3b", 1, sku=sku, finetune=LORA)).methods[0].max_micro_batch
        for sku in ("a10", "a100-80gb")
    )
    assert 0 < small < large


def test_a_micro_batch_of_zero_is_said_and_not_an_empty_answer() -> None:
    report = compare(request_of("llama-2-7b", 1))
    (row,) = report.methods
    assert (row.max_micro_batch, row.micro_batch) == (0, 1)
    assert row.verdict is Verdict.OOM
    assert report.recommended is None


def test_more_replicas_do_not_make_room() -> None:
    """GPU memory is not summed up: data parallelism keeps all of it on each GPU."""
    for gpus in (2, 8):
        report = compare(request_of("llama-2-7b", gpus, methods=(Method.DDP,)))
        assert report.methods[0].max_micro_batch == 0


def test_blocks_that_differ_count_by_the_largest() -> None:
    job = Job(model=zoo_model("deepseek-v2-lite"))
    mine = parts_of(job, Method.ZERO3, Layout(dp=8, shard=8), gpu()).counts
    assert mine.largest_block.base > 5 * mine.blocks[0].base


def test_a_rank_costs_its_adapters_and_what_passes_through_them() -> None:
    """From rank 8 to 64 it is 16 B for each element that is added, and no gigabytes."""
    low, high = (
        ledger_of(step_of(Job(model=zoo_model("llama-2-7b"), finetune=replace(LORA, r=r))))
        for r in (8, 64)
    )
    added = 56 * 32 * 4 * (4096 + 4096)
    for instant, per_element in ((Instant.LOAD, 4), (Instant.OPTIMIZER_STEP, 16)):
        found = sum(high[instant].values()) - sum(low[instant].values())
        assert found == per_element * added
    for term in (Term.CHECKPOINTS, Term.LOSS_TEMPORARIES):
        assert high[Instant.LOSS_BACKWARD][term] == low[Instant.LOSS_BACKWARD][term]


def test_four_bits_may_cost_more_than_sixteen() -> None:
    """Embeddings, head, norms and all that follows them in fp32 outweigh what the Linears save."""
    job = Job(
        model=zoo_model("gemma-2b"),
        seq_len=2048,
        precision=Precision.BF16_TRUE,
        checkpointing=Checkpointing.NONE,
        finetune=LORA,
    )
    quantised = replace(LORA, kind=FinetuneKind.QLORA)
    prepared, plain = (
        peak(replace(job, finetune=replace(quantised, upcast=upcast)))
        for upcast in (Upcast.ALL, Upcast.NONE)
    )
    assert plain < peak(job) < prepared


def test_replicas_of_a_quantised_model_each_hold_all_of_it() -> None:
    """Eight cards of 40 GB do not add up for Llama-2-70B by data parallelism; shards do.

    All but bitsandbytes' scales, a byte for 64 weights: they are no parameters.
    """
    job = Job(model=zoo_model("llama-2-70b"), finetune=replace(LORA, kind=FinetuneKind.QLORA))
    two, eight = (
        ledger_of(step_of(job, Method.DDP, gpus=gpus))[Instant.LOAD][Term.WEIGHTS]
        for gpus in (2, 8)
    )
    assert two == eight > 34e9
    shard = ledger_of(step_of(job, Method.FSDP, gpus=8))[Instant.LOAD][Term.WEIGHTS]
    scales = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) / 64
    assert shard - eight / 8 == pytest.approx(7 / 8 * scales, rel=0.05)


def test_one_sequence_is_no_quarter_of_four() -> None:
    """Weights do not shrink with the batch: dividing a measured peak by it is wrong."""
    job = Job(
        model=zoo_model("falcon-7b"),
        finetune=LORA,
        precision=Precision.BF16_TRUE,
        checkpointing=Checkpointing.NONE,
    )
    one, four = (peak(job, micro_batch=batch) for batch in (1, 4))
    weights = 2 * describe(job.model).num_parameters
    assert one - four / 4 == pytest.approx(0.75 * weights, rel=0.02)
