from __future__ import annotations

from dataclasses import replace

import pytest

from src.plan.result import MethodReport, ModelSummary, Recommendation, Report
from src.spec import (
    Cluster,
    EstimatorKind,
    Gpu,
    Interconnect,
    Job,
    Layout,
    Method,
    Model,
    Request,
    Verdict,
)
from src.units import GIB, MIB, Levels

GPU = Gpu(
    sku="test-40gb",
    name="Test GPU 40GB",
    compute_capability=(8, 0),
    usable_gib=39.5,
    context_mib=400,
    memory_bandwidth_gbps=1555,
    bf16_tflops=312,
    fp16_tflops=312,
    tf32_tflops=156,
    fp32_tflops=19.5,
    interconnect=Interconnect.NVLINK,
    link_gbps=300,
    gpus_per_node=8,
    sm_count=108,
)
LEDGER = {
    "load": {"weights": 4 * GIB, "activations": 0},
    "forward_end": {"weights": 4 * GIB, "activations": 6 * GIB, "logits": 512 * MIB},
    "loss_backward": {"weights": 4 * GIB, "activations": 6 * GIB, "logits": GIB},
    "optimizer_step": {"weights": 4 * GIB, "gradients": 2 * GIB, "never": 0},
}


def levels(gib: float) -> Levels:
    return Levels(
        allocated=round(gib * GIB), reserved=round((gib + 1) * GIB), device=round((gib + 2) * GIB)
    )


def method_report(method: Method, *, layout: Layout, verdict: Verdict, gib: float) -> MethodReport:
    return MethodReport(
        method=method,
        layout=layout,
        micro_batch=8,
        peak_bytes=levels(gib),
        upper_bytes=levels(gib * 1.1),
        peak_instant="loss_backward",
        ledger=LEDGER,
        max_micro_batch=0 if verdict is Verdict.OOM else 24,
        tokens_per_second=None if verdict is Verdict.OOM else 12345.6,
        verdict=verdict,
        notes=("device level is a first model",),
    )


def make_report(num_methods: int) -> Report:
    verdicts = [Verdict.FITS, Verdict.TIGHT, Verdict.OOM]
    methods = tuple(
        method_report(
            list(Method)[index % len(Method)],
            layout=Layout(dp=4, shard=2 if index == 0 else 1),
            verdict=verdicts[index % 3],
            gib=11.0 + 20 * index,
        )
        for index in range(num_methods)
    )
    model = Model(
        name="tiny",
        hf_id="someone/tiny",
        config={"model_type": "gpt2", "n_layer": 2, "n_inner": None},
    )
    request = Request(job=Job(model=model), cluster=Cluster(gpu=GPU, num_gpus=4, gpus_per_node=8))
    recommended = Recommendation(
        method=methods[0].method,
        layout=methods[0].layout,
        micro_batch=8,
        reason="it is the fastest",
    )
    return Report(
        request=request,
        model=ModelSummary(
            name="tiny",
            hf_id="someone/tiny",
            model_type="gpt2",
            num_parameters=1_234_567,
            num_trainable_parameters=1_234_567,
        ),
        gpu=GPU,
        estimator=EstimatorKind.FORMULA,
        methods=methods,
        recommended=recommended,
        calibration=None,
        warnings=("a100 is assumed",),
    )


@pytest.fixture
def report() -> Report:
    return make_report(3)


@pytest.fixture
def nothing_fits(report: Report) -> Report:
    return replace(report, recommended=None, methods=report.methods[2:])


@pytest.fixture(params=[1, 2, 5, 12])
def report_of_any_size(request: pytest.FixtureRequest) -> Report:
    return make_report(int(request.param))
