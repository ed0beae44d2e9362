"""Measured step times as factors of the model's parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from src.architecture import describe
from src.plan import compare
from src.plan.pace import (
    MIN_ROWS,
    estimators_pace,
    fit_pace,
    is_timed,
    modelled,
    pace_of,
    pace_of_rows,
    pace_values,
)
from src.plan.throughput import MODELLED, Pace, StepTime, tokens_per_second
from src.record import Outcome, Source
from src.spec import Cluster, Job, Method, Precision, Request
from tests.calibration_rows import rows_of, steps
from tests.jobs import gpu, step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"), precision=Precision.FP16_MIXED)


def times(count: int, seed: int = 0) -> list[StepTime]:
    draw = np.random.default_rng(seed).uniform(0.05, 1.0, size=(count, 4)).tolist()
    return [StepTime(compute=a, traffic=b, optimizer=c, exposed=d) for a, b, c, d in draw]


def test_planted_factors_are_found() -> None:
    planted = Pace(compute=1.4, memory=0.7, communication=2.5)
    found = fit_pace((time, time.at(planted)) for time in times(200))
    assert found is not None
    assert found.compute == pytest.approx(1.4, rel=0.03)
    assert found.memory == pytest.approx(0.7, rel=0.03)
    assert found.communication == pytest.approx(2.5, rel=0.03)
    assert found.num_rows == 200


def test_what_no_row_speaks_of_stays_the_models() -> None:
    alone = [replace(time, exposed=0.0) for time in times(40)]
    found = fit_pace((time, 2 * time.seconds) for time in alone)
    assert found is not None
    assert found.communication == 1.0
    assert found.compute == pytest.approx(2.0, rel=0.05)


def test_noise_of_a_tenth_moves_factors_by_less() -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.1, size=100).tolist()
    pairs = [(time, time.seconds * one) for time, one in zip(times(100), noise, strict=True)]
    found = fit_pace(pairs)
    assert found is not None
    for factor in (found.compute, found.memory, found.communication):
        assert factor == pytest.approx(1.0, abs=0.1)


def test_too_few_rows_give_none() -> None:
    assert fit_pace((time, time.seconds) for time in times(MIN_ROWS - 1)) is None
    found = fit_pace((time, time.seconds) for time in times(MIN_ROWS))
    assert found is not None
    assert found.num_rows == MIN_ROWS
    assert found.compute == pytest.approx(1.0)


def test_only_clean_measured_steps_are_timed() -> None:
    row = replace(rows_of(steps(1))[0], source=Source.MEASURED, comm="none")
    timed = replace(row, numbers={"step_seconds": 1.5})
    assert is_timed(timed)
    for other in (
        row,
        replace(timed, comm="fake"),
        replace(
            timed,
            source=Source.PUBLISHED,
            provenance=replace(timed.provenance, url="https://example.org"),
        ),
        replace(timed, numbers={"step_seconds": 1.5, "num_alloc_retries": 1}),
        replace(timed, outcome=Outcome.TIMEOUT),
    ):
        assert not is_timed(other)


def test_rows_of_a_slow_gpu_make_it_slow() -> None:
    drawn = steps(30)
    rows = [
        replace(row, numbers={**row.numbers, "step_seconds": 3 * modelled(step).seconds})
        for step, row in zip(drawn, rows_of(drawn), strict=True)
    ]
    by_case = {row.case_id: step for step, row in zip(drawn, rows, strict=True)}
    pace = pace_of_rows(rows, lambda row: by_case[row.case_id])
    assert pace is not None
    assert pace.num_rows == len(rows)
    assert pace.compute == pytest.approx(3.0, rel=0.1)


def test_a_pace_is_kept_as_plain_values() -> None:
    pace = Pace(compute=1.5, memory=0.5, communication=3.0, num_rows=20)
    assert pace_of(pace_values(pace)) == pace
    assert pace_of(pace_values(None)) == MODELLED


def test_speed_follows_the_pace() -> None:
    step = step_of(JOB, Method.FSDP, gpus=4)
    cluster = Cluster(gpu=gpu(), num_gpus=4, gpus_per_node=8)
    decoder = describe(JOB.model)
    slow = Pace(compute=2.0, memory=2.0, communication=2.0)
    fast = tokens_per_second(step, cluster, decoder)
    assert tokens_per_second(step, cluster, decoder, slow) == pytest.approx(fast / 2)


def test_a_report_goes_at_its_estimators_pace() -> None:
    from src.memory import estimate_step

    class Timed:
        pace = pace_values(Pace(compute=4.0, memory=4.0, communication=4.0, num_rows=33))

        def __call__(self, step):
            return estimate_step(step)

    request = Request(job=JOB, cluster=Cluster(gpu=gpu(), num_gpus=1, gpus_per_node=1))
    plain, timed = compare(request), compare(request, Timed())
    assert estimators_pace(Timed()).num_rows == 33
    assert estimators_pace(estimate_step) == MODELLED
    speeds = [report.methods[0].tokens_per_second for report in (plain, timed)]
    assert speeds[0] == pytest.approx(4 * speeds[1])
    assert any("33 measured steps" in warning for warning in timed.warnings)
    assert any("for ranking only" in warning for warning in plain.warnings)
