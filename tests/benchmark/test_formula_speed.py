"""How many estimates a second: `pytest -m benchmark --benchmark-enable`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest

from src.memory import estimate_step, peak_allocated
from src.spec import Job, Method
from tests.jobs import gpu, layout_of, step_of, zoo_model

JOB = Job(model=zoo_model("llama-3-8b"))
METHODS = (Method.DDP, Method.ZERO3, Method.FSDP, Method.TP)


@pytest.mark.benchmark
def test_peaks_one_by_one(benchmark: Any) -> None:
    cases = itertools.cycle(
        (method, layout_of(method, 4), batch, 128 * length)
        for method in METHODS
        for batch in range(1, 33)
        for length in range(1, 9)
    )
    card = gpu()

    def thousand() -> None:
        for method, layout, batch, length in itertools.islice(cases, 1000):
            peak_allocated(JOB, method, layout, card, micro_batch=batch, seq_len=length)

    benchmark(thousand)


@pytest.mark.benchmark
def test_whole_ledgers(benchmark: Any) -> None:
    steps = itertools.cycle(
        step_of(JOB, method, gpus=4, micro_batch=batch)
        for method in METHODS
        for batch in range(1, 33)
    )
    benchmark(lambda: [estimate_step(step) for step in itertools.islice(steps, 100)])


@pytest.mark.benchmark
def test_a_hundred_thousand_at_once(benchmark: Any) -> None:
    batches = numpy.arange(1, 100_001)
    card, layout = gpu(), layout_of(Method.FSDP, 4)
    benchmark(
        lambda: peak_allocated(
            JOB, Method.FSDP, layout, card, micro_batch=batches, seq_len=numpy.int64(512)
        )
    )
