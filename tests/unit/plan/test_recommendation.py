"""Which row is recommended, in which order rows come, and what the reason says."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import StrEnum

import pytest
from hypothesis import given

from src.memory import Instant, Term
from src.plan import compare
from src.plan.policy import SAME_SPEED, SIMPLEST_FIRST
from src.plan.result import MethodReport, Report
from src.spec import EstimatorKind, Layout, Method, Precision, Request, Verdict
from src.units import Levels
from tests.jobs import LORA, gpu
from tests.plan_requests import PerMethod, request_of
from tests.strategies import requests

GIB_USABLE = gpu().usable_gib


def row_of(report: Report, method: Method) -> MethodReport:
    return next(row for row in report.methods if row.method is method)


def test_every_method_has_a_place_among_the_simplest() -> None:
    assert sorted(SIMPLEST_FIRST) == sorted(Method)


def test_of_equally_fast_methods_the_simplest_is_recommended() -> None:
    report = compare(request_of(micro_batch=64), PerMethod(otherwise=10.0))
    speeds = [row.tokens_per_second or 0.0 for row in report.methods]
    equal = {
        row.method
        for row, speed in zip(report.methods, speeds, strict=True)
        if speed >= max(speeds) * (1 - SAME_SPEED)
    }
    assert len(equal) > 1
    assert report.recommended is not None
    assert report.recommended.method is min(equal, key=SIMPLEST_FIRST.index)
    assert f"simplest of the {len(equal)} within 2% of the fastest" in report.recommended.reason
    others = equal - {report.recommended.method}
    assert all(method.value in report.recommended.reason for method in others)


def test_the_only_one_that_fits_is_recommended_whatever_its_speed() -> None:
    report = compare(request_of(), PerMethod({Method.TP: 10.0}))
    assert report.recommended is not None
    assert report.recommended.method is Method.TP
    reason = report.recommended.reason
    assert reason.startswith(f"the only one of {len(report.methods)} that fits")
    for row in report.methods[1:]:
        assert row.method.value in reason


def test_a_lead_is_told_in_percent_over_the_next() -> None:
    # short of memory: one is at a micro batch many times the other's
    needs = {Method.DDP: 10.0, Method.TP: 10.0}
    report = compare(request_of(micro_batch=1), PerMethod(needs))
    assert report.recommended is not None
    first, second = report.methods[:2]
    lead = (first.tokens_per_second or 0) / (second.tokens_per_second or 1) - 1
    assert lead > SAME_SPEED
    assert f"{lead:.0%} ahead of {second.method.value}" in report.recommended.reason


def test_one_row_is_recommended_by_its_bound() -> None:
    report = compare(request_of(gpus=1, micro_batch=1), PerMethod(otherwise=10.0, margin=1.5))
    assert report.recommended is not None
    assert report.recommended.reason == "fits with 15.00 GiB at most"


def test_what_is_tight_is_not_recommended() -> None:
    needs = {Method.DDP: GIB_USABLE - 1, Method.TP: 10.0}
    report = compare(request_of(micro_batch=1), PerMethod(needs, margin=1.1))
    assert row_of(report, Method.DDP).verdict is Verdict.TIGHT
    assert report.recommended is not None
    assert report.recommended.method is Method.TP
    assert "ddp" in report.recommended.reason
    tight_alone = compare(
        request_of(micro_batch=1, methods=(Method.DDP,)), PerMethod(needs, margin=1.1)
    )
    assert tight_alone.recommended is None


def test_rows_come_by_verdict_then_speed_after_the_recommended() -> None:
    needs = {Method.DDP: 500.0, Method.FSDP: GIB_USABLE - 1}
    report = compare(
        request_of(gpus=8, micro_batch=1), PerMethod(needs, otherwise=10.0, margin=1.1)
    )
    rest = report.methods[1:]
    order = {Verdict.FITS: 0, Verdict.TIGHT: 1, Verdict.OOM: 2}
    ranks = [(order[row.verdict], -(row.tokens_per_second or 0.0)) for row in rest]
    assert ranks == sorted(ranks)
    assert [row.method for row in rest[-2:]] == [Method.FSDP, Method.DDP]


@given(request=requests())
def test_a_report_agrees_with_itself(request: Request) -> None:
    report = compare(request)
    assert report.request is request
    assert report.gpu == request.cluster.gpu
    assert report.estimator is EstimatorKind.FORMULA
    assert report.calibration is None
    for row in report.methods:
        fits = row.verdict is Verdict.FITS
        asked = request.micro_batch
        assert row.micro_batch == (asked or max(row.max_micro_batch, 1))
        assert fits == (row.max_micro_batch >= row.micro_batch)
        assert (row.tokens_per_second is None) == (row.verdict is Verdict.OOM)
        assert set(row.ledger) == set(Instant)
        assert sum(row.ledger[row.peak_instant].values()) == row.peak_bytes.allocated
    if report.recommended is None:
        assert not any(row.verdict is Verdict.FITS for row in report.methods)
        assert any(line.startswith("nothing fits") for line in report.warnings)
    else:
        first = report.methods[0]
        assert first.verdict is Verdict.FITS
        assert report.recommended.micro_batch == first.micro_batch
        assert (report.recommended.method, report.recommended.layout) == (
            first.method,
            first.layout,
        )


def test_parameters_of_the_model_and_those_that_are_trained() -> None:
    full = compare(request_of("llama-3-8b", 1)).model
    lora = compare(request_of("llama-3-8b", 1, finetune=LORA)).model
    assert full.num_parameters == full.num_trainable_parameters == 8_030_261_248
    assert lora.num_parameters == 8_030_261_248
    assert lora.num_trainable_parameters == 13_631_488


def test_types_are_those_of_the_schema() -> None:
    report = compare(request_of(micro_batch=2, precision=Precision.FP16_MIXED, sku="v100-16gb"))
    for row in report.methods:
        assert isinstance(row.method, Method)
        assert isinstance(row.layout, Layout)
        assert type(row.micro_batch) is type(row.max_micro_batch) is int
        for levels in (row.peak_bytes, row.upper_bytes):
            assert isinstance(levels, Levels)
            assert all(type(getattr(levels, field.name)) is int for field in fields(levels))
        assert row.tokens_per_second is None or type(row.tokens_per_second) is float
        assert type(row.peak_instant) is str or isinstance(row.peak_instant, StrEnum)
        cells = [cell for column in row.ledger.values() for cell in column.values()]
        assert all(type(cell) is int for cell in cells)
        assert {term for column in row.ledger.values() for term in column} <= set(Term)
        assert json.loads(json.dumps(row.ledger)) == row.ledger
    assert is_dataclass(report)
    assert all(type(line) is str for line in report.warnings)


def test_the_estimator_is_asked_in_place_of_the_formula() -> None:
    estimator = PerMethod(otherwise=10.0, slope=1.0)
    report = compare(request_of(methods=(Method.DDP,)), estimator)
    assert report.methods[0].max_micro_batch == int(GIB_USABLE - 10)
    assert estimator.asked


@pytest.mark.parametrize("micro_batch", [1, 7])
def test_the_largest_micro_batch_does_not_depend_on_the_one_asked_for(micro_batch: int) -> None:
    free = compare(request_of(methods=(Method.DDP, Method.FSDP)))
    asked = compare(request_of(methods=(Method.DDP, Method.FSDP), micro_batch=micro_batch))
    for method in (Method.DDP, Method.FSDP):
        assert row_of(free, method).max_micro_batch == row_of(asked, method).max_micro_batch
