"""How many estimates a second: `pytest -m benchmark --benchmark-enable`.

Warm: columns of a job under a method are cached, a peak at a micro batch and sequence is arithmetic
over a few of them. Cold: every cache is cleared, so the config is described, its blocks are lowered
to tapes and walked, and the columns put together.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy
import pytest

from src.architecture import describe
from src.memory import estimate_step, peak_allocated
from src.memory.counts import count_model
from src.memory.profile import profile
from src.plan import largest_micro_batch
from src.spec import Checkpointing, Finetune, Job, Method, Precision
from tests.jobs import LORA, OPTIMIZERS, gpu, layout_of, step_of, zoo_model

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


@pytest.mark.benchmark
def test_a_grid_of_batch_and_sequence_at_once(benchmark: Any) -> None:
    batches, lengths = numpy.arange(1, 401)[:, None], 16 * numpy.arange(1, 251)[None, :]
    card, layout = gpu(), layout_of(Method.ZERO3, 4)
    peaks = benchmark(
        lambda: peak_allocated(
            JOB, Method.ZERO3, layout, card, micro_batch=batches, seq_len=lengths
        )
    )
    assert peaks.shape == (400, 250)


@pytest.mark.benchmark
def test_many_settings_one_by_one(benchmark: Any) -> None:
    """Every job another: what is cached is the columns of 640 jobs."""
    jobs = [
        Job(
            model=zoo_model(name),
            finetune=finetune,
            precision=precision,
            optimizer=optimizer,
            checkpointing=checkpointing,
        )
        for name in ("opt-1.3b", "llama-3-8b", "gemma-2b", "pythia-160m", "qwen2.5-0.5b")
        for finetune in (Finetune(), LORA)
        for precision in Precision
        for optimizer in OPTIMIZERS
        for checkpointing in Checkpointing
    ]
    card = gpu()
    layouts = [(method, layout_of(method, 4)) for method in (Method.DDP, Method.FSDP)]

    def each() -> None:
        for job in jobs:
            for method, layout in layouts:
                peak_allocated(job, method, layout, card, micro_batch=4, seq_len=512)

    benchmark(each)


@pytest.mark.benchmark
@pytest.mark.parametrize("name", ["opt-1.3b", "llama-3-8b", "llama-2-70b"])
def test_one_with_every_cache_cleared(benchmark: Any, name: str) -> None:
    card, layout, job = gpu(), layout_of(Method.FSDP, 4), Job(model=zoo_model(name))
    columns = importlib.import_module("src.memory.columns")
    caches = (describe, count_model, profile, columns._answer)

    def cold() -> None:
        for cache in caches:
            cache.cache_clear()
        peak_allocated(job, Method.FSDP, layout, card, micro_batch=4, seq_len=512)

    benchmark(cold)


@pytest.mark.benchmark
def test_a_search_for_the_largest_micro_batch(benchmark: Any) -> None:
    step = step_of(JOB, Method.FSDP, gpus=4)
    assert benchmark(lambda: largest_micro_batch(step, estimate_step)) > 0
