"""LLMem's decision rule: its scores, how equal ones are settled, and what happens at zero."""

from __future__ import annotations

import pytest

from src.plan import compare
from src.plan.policy import LLMEM_METHODS, llmem_score
from src.plan.result import MethodReport, Report
from src.spec import EstimatorKind, Method, Policy, Verdict
from tests.jobs import gpu
from tests.plan_requests import PerMethod, request_of

USABLE = gpu().usable_gib


def largest(**batches: int) -> PerMethod:
    """An estimator by which each method's largest micro batch is the given one; 0 for others."""
    names = {method.name.casefold(): method for method in Method}
    needs = {names[name]: USABLE - batch - 0.5 for name, batch in batches.items()}
    return PerMethod(needs=needs, slope=1.0)


def decided(estimator: PerMethod, gpus: int = 4, **keys: object) -> Report:
    return compare(request_of(gpus=gpus, policy=Policy.LLMEM, **keys), estimator)


def score_of(report: Report, method: Method, tp: int = 1) -> float:
    rows = [row for row in report.methods if (row.method, row.layout.tp) == (method, tp)]
    assert len(rows) == 1
    return llmem_score(rows[0])


def chosen(report: Report) -> MethodReport:
    assert report.recommended is not None
    first = report.methods[0]
    assert (first.method, first.layout) == (report.recommended.method, report.recommended.layout)
    return first


def test_the_scores_by_hand() -> None:
    report = decided(
        largest(ddp=2, fsdp=5, zero3=4, tp=20, ddp_tp=6, fsdp_tp=7, zero2=40, fsdp_grad=40)
    )
    assert score_of(report, Method.DDP) == 2 * 4 * 1.5
    assert score_of(report, Method.FSDP) == 5 * 4
    assert score_of(report, Method.ZERO3) == 4 * 4
    assert score_of(report, Method.TP, 4) == 20
    assert score_of(report, Method.DDP_TP, 2) == 6 * 2
    assert score_of(report, Method.FSDP_TP, 2) == 7 * 2
    assert score_of(report, Method.ZERO2) == 0
    assert score_of(report, Method.FSDP_GRAD) == 0


@pytest.mark.parametrize(
    ("batches", "best"),
    [
        ({"ddp": 2, "fsdp": 3, "tp": 12, "ddp_tp": 6}, Method.DDP),
        ({"fsdp": 3, "tp": 12, "ddp_tp": 6}, Method.FSDP),
        ({"tp": 12, "ddp_tp": 6, "fsdp_tp": 6}, Method.TP),
        ({"ddp_tp": 6, "fsdp_tp": 6}, Method.DDP_TP),
        ({"fsdp": 3, "zero3": 3}, Method.FSDP),
    ],
    ids=["all", "without CDP", "without ADP", "DP+TP alone", "two ADP"],
)
def test_equal_scores_go_to_cdp_then_adp_then_tp_then_both(
    batches: dict[str, int], best: Method
) -> None:
    report = decided(largest(**batches))
    assert len({llmem_score(row) for row in report.methods if llmem_score(row)}) == 1
    assert chosen(report).method is best
    assert report.recommended is not None
    assert report.recommended.reason.endswith("(equal scores go by LLMem's order)")


@pytest.mark.parametrize(
    ("batches", "best"),
    [
        ({"ddp": 2, "fsdp": 4}, Method.FSDP),
        ({"ddp": 3, "fsdp": 4}, Method.DDP),
        ({"ddp": 1, "fsdp": 1, "tp": 7, "fsdp_tp": 4}, Method.FSDP_TP),
        ({"ddp": 1, "tp": 7}, Method.TP),
    ],
)
def test_the_highest_score_wins(batches: dict[str, int], best: Method) -> None:
    report = decided(largest(**batches))
    assert chosen(report).method is best
    assert report.recommended is not None
    assert report.recommended.reason.startswith(
        f"LLMem's rule: {LLMEM_METHODS[best].value} scores {llmem_score(chosen(report)):g}, then "
    )
    assert "equal" not in report.recommended.reason


def test_of_two_layouts_of_one_method_the_better_scored_is_taken() -> None:
    # 16 heads on 8 GPUs: tp2 dp4 scores 3*4, tp4 dp2 the same batch times 2
    report = decided(largest(fsdp_tp=3), gpus=8, methods=(Method.FSDP_TP,))
    assert chosen(report).layout.tp == 2
    assert sorted(llmem_score(row) for row in report.methods) == [6, 12]


def test_a_method_unknown_to_llmem_is_never_recommended() -> None:
    report = decided(largest(zero2=50, fsdp_grad=50, tp=1))
    assert chosen(report).method is Method.TP
    unknown = decided(largest(zero2=50))
    assert unknown.recommended is None
    (said,) = [line for line in unknown.warnings if "every score is 0" in line]
    assert "zero2 would fit" in said
    assert not any(line.startswith("nothing fits") for line in unknown.warnings)


def test_all_zero_is_cpu_offload() -> None:
    report = decided(largest())
    assert report.recommended is None
    assert any(line.endswith("LLMem falls back on CPU offload") for line in report.warnings)
    assert any(line.startswith("nothing fits") for line in report.warnings)


def test_what_does_not_fit_at_the_asked_batch_is_not_recommended() -> None:
    report = decided(largest(ddp=8, fsdp=10), micro_batch=9)
    assert [row.method for row in report.methods if row.verdict is Verdict.FITS] == [Method.FSDP]
    assert chosen(report).method is Method.FSDP
    assert chosen(report).micro_batch == 9


def test_one_gpu_is_cdp_of_one() -> None:
    report = decided(largest(single=4), gpus=1)
    assert llmem_score(chosen(report)) == 4 * 1 * 1.5


def test_the_default_is_the_fastest_and_the_formula_may_be_judged_by_either() -> None:
    request = request_of(policy=Policy.LLMEM)
    assert request_of().policy is Policy.FASTEST
    report = compare(request)
    assert report.estimator is EstimatorKind.FORMULA
    best = max(llmem_score(row) for row in report.methods)
    assert llmem_score(chosen(report)) == best > 0
