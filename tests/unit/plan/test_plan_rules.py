"""Which methods are compared, what fits, what is recommended, what would have to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.architecture import describe
from src.errors import UserError
from src.memory import Estimate, Instant, Term, estimate_step
from src.plan import compare, largest_micro_batch, verdict
from src.plan.layouts import candidates, tensor_parallel_degrees
from src.plan.search import with_micro_batch
from src.plan.throughput import forward_flops_per_token, step_time, tokens_per_second
from src.spec import Cluster, Job, Layout, Method, Precision, Request, Step, Verdict
from src.units import GIB, Levels
from tests.jobs import gpu, step_of, zoo_model


def request(name: str = "opt-1.3b", gpus: int = 4, *, sku: str = "a100-80gb", **keys) -> Request:
    job_keys = {key: keys.pop(key) for key in ("precision", "seq_len") if key in keys}
    per_node = keys.pop("gpus_per_node", 8)
    cluster = Cluster(gpu=gpu(sku), num_gpus=gpus, gpus_per_node=per_node)
    return Request(job=Job(model=zoo_model(name), **job_keys), cluster=cluster, **keys)


def found(asked: Request) -> list[tuple[Method, Layout]]:
    decoder = describe(asked.job.model)
    return [(item.method, item.layout) for item in candidates(asked, decoder)]


def test_every_method_of_four_gpus() -> None:
    layouts = dict(found(request()))
    assert layouts[Method.DDP] == Layout(dp=4)
    assert layouts[Method.ZERO2] == Layout(dp=4, shard=4)
    assert layouts[Method.TP] == Layout(tp=4)
    assert layouts[Method.DDP_TP] == Layout(dp=2, tp=2)
    assert layouts[Method.FSDP_TP] == Layout(dp=2, tp=2, shard=2)
    assert Method.SINGLE not in layouts


def test_one_gpu_compares_single_alone() -> None:
    assert found(request(gpus=1)) == [(Method.SINGLE, Layout())]


@pytest.mark.parametrize(
    ("name", "gpus", "per_node", "degrees"),
    [
        ("opt-1.3b", 8, 8, (2, 4, 8)),  # 32 heads
        ("opt-125m", 8, 8, (2, 4)),  # 12 heads
        ("llama-3-8b", 16, 8, (2, 4, 8)),  # 8 key/value heads, and a node of 8
        ("gemma-2b", 8, 8, ()),  # one key/value head
        ("qwen2.5-0.5b", 4, 4, (2,)),  # 14 heads, 2 key/value heads
        ("opt-1.3b", 3, 8, ()),
        ("mixtral-8x7b", 8, 8, (2, 4, 8)),  # experts of 14336
        ("gpt-oss-20b", 8, 8, ()),  # experts with biases
        ("deepseek-v2-lite", 8, 8, ()),  # an attention that no plan splits
    ],
)
def test_tensor_parallel_degrees(name: str, gpus: int, per_node: int, degrees) -> None:
    cluster = Cluster(gpu=gpu(), num_gpus=gpus, gpus_per_node=per_node)
    assert tensor_parallel_degrees(describe(zoo_model(name)), cluster) == degrees


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(methods=(Method.SINGLE,)), "method=single: runs on one GPU"),
        (request(gpus=1, methods=(Method.TP,)), "method=tp: needs 2 GPUs"),
        (request(gpus=1, methods=(Method.DDP_TP,)), "method=ddp[+]tp: needs 2 GPUs"),
        (request(tp=3), "tp=3: has to divide gpus=4, 32 heads"),
        (request("gemma-2b", methods=(Method.TP,)), "no tensor-parallel degree"),
        (request("gpt-oss-20b", gpus=8, methods=(Method.FSDP_TP,)), "mixture of experts"),
        (request(gpus=16, methods=(Method.TP,)), "needs one degree over all gpus=16"),
        (
            request(methods=(Method.ZERO2,), precision=Precision.BF16_TRUE),
            "method=zero2: DeepSpeed keeps an fp32 master copy",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(asked: Request, words: str) -> None:
    with pytest.raises(UserError, match=words):
        candidates(asked, describe(asked.job.model))


def test_pure_bf16_leaves_deepspeed_out() -> None:
    methods = [method for method, _ in found(request(precision=Precision.BF16_TRUE))]
    assert methods
    assert not any(method.is_zero for method in methods)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(fixed=st.integers(0, 90), slope=st.integers(1, 4000), wall=st.integers(1, 80))
def test_the_largest_micro_batch_equals_counting_up(fixed: int, slope: int, wall: int) -> None:
    step = step_of(Job(model=zoo_model("opt-125m")))

    def fake(asked: Step) -> Estimate:
        peak = fixed * GIB + slope * asked.micro_batch * GIB // 1000
        levels = Levels(allocated=peak, reserved=peak, device=peak)
        return Estimate(
            peak_bytes=levels,
            upper_bytes=levels,
            peak_instant=Instant.LOAD,
            ledger={Instant.LOAD: {Term.WEIGHTS: peak}},
        )

    card = replace(step.gpu, usable_gib=float(wall))
    step = replace(step, gpu=card)
    counted = 0
    while verdict(fake(with_micro_batch(step, counted + 1)), card) is Verdict.FITS:
        counted += 1
    assert largest_micro_batch(step, fake) == counted


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    for row in compare(request(sku="v100-16gb", precision=Precision.FP16_MIXED)).methods:
        step = step_of(
            Job(model=zoo_model("opt-1.3b"), precision=Precision.FP16_MIXED),
            micro_batch=1,
            sku="v100-16gb",
        )
        step = replace(step, method=row.method, layout=row.layout)
        next_one = estimate_step(with_micro_batch(step, row.max_micro_batch + 1))
        assert verdict(next_one, step.gpu) is not Verdict.FITS
        if row.max_micro_batch:
            this = estimate_step(with_micro_batch(step, row.max_micro_batch))
            assert verdict(this, step.gpu) is Verdict.FITS


def test_the_report_puts_the_recommended_first_and_what_does_not_fit_last() -> None:
    report = compare(request("opt-2.7b", sku="v100-16gb", precision=Precision.FP16_MIXED))
    assert report.recommended is not None
    first = report.methods[0]
    assert (first.method, first.layout) == (report.recommended.method, report.recommended.layout)
    assert first.verdict is Verdict.FITS
    verdicts = [row.verdict for row in report.methods]
    assert verdicts == sorted(verdicts, key=list(Verdict).index)
    assert "ddp" in report.recommended.reason
    for row in report.methods:
        assert (row.tokens_per_second is None) == (row.verdict is Verdict.OOM)
        assert row.peak_instant in row.ledger


def test_an_asked_micro_batch_is_the_one_answered() -> None:
    report = compare(request(micro_batch=4))
    assert {row.micro_batch for row in report.methods} == {4}
    assert all(row.max_micro_batch >= 4 for row in report.methods)


def test_where_nothing_fits_what_is_missing_is_told() -> None:
    report = compare(request("llama-2-7b", 1))
    assert report.recommended is None
    line = next(warning for warning in report.warnings if warning.startswith("nothing fits"))
    (row,) = report.methods
    missing = row.upper_bytes.device - report.gpu.usable_bytes
    assert f"{missing / 2**30:.2f} GiB more than a100-80gb has" in line


def test_a_sequence_beyond_a_learned_table_is_refused_and_beyond_rotary_warned_about() -> None:
    with pytest.raises(UserError, match="seq_len=4096: at most 2048"):
        compare(request(seq_len=4096))
    report = compare(request("pythia-160m", 1, seq_len=4096))
    assert any("seq_len=4096 is beyond the 2048 positions" in line for line in report.warnings)


def test_flops_of_a_token_are_two_per_weight_and_attention() -> None:
    model = zoo_model("llama-2-7b")
    decoder = describe(model)
    embedding = decoder.token_embedding.rows * decoder.token_embedding.width
    flops = forward_flops_per_token(decoder, Job(model=model, seq_len=1))
    assert flops == pytest.approx(2 * (decoder.num_parameters - embedding), rel=0.001)
    longer = forward_flops_per_token(decoder, Job(model=model, seq_len=4097))
    assert longer - flops == pytest.approx(32 * 2 * 4096 * 4096, rel=1e-6)


def test_tensor_parallelism_over_pcie_is_slower_than_data_parallelism() -> None:
    job = Job(model=zoo_model("opt-1.3b"), precision=Precision.FP16_MIXED)
    cluster = Cluster(gpu=gpu("v100-16gb-pcie"), num_gpus=4, gpus_per_node=4)
    decoder = describe(job.model)
    speeds = [
        tokens_per_second(
            replace(step_of(job, method, gpus=4, micro_batch=4), gpu=cluster.gpu), cluster, decoder
        )
        for method in (Method.DDP, Method.DDP_TP, Method.TP)
    ]
    assert speeds[0] > speeds[1] > speeds[2]


def test_a_step_takes_longer_with_more_tokens_and_less_with_lora() -> None:
    from tests.jobs import LORA

    job = Job(model=zoo_model("llama-2-7b"))
    cluster = Cluster(gpu=gpu(), num_gpus=1, gpus_per_node=8)
    decoder = describe(job.model)
    one, two = (
        step_time(step_of(job, micro_batch=batch), cluster, decoder).seconds for batch in (1, 2)
    )
    lora = step_time(step_of(replace(job, finetune=LORA)), cluster, decoder).seconds
    assert two > one > lora
