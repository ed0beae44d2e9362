"""Measured rows whose truth is known: the formula's bytes, bent by an allocator and by noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from src.config.gpu import load_gpu
from src.config.model import resolve_model
from src.measure.case import parse_case
from src.measure.client import case_of
from src.memory import estimate_step
from src.record import Outcome, Provenance, Row, Source
from src.residual.champion import Origin
from src.residual.correctors import Allocator
from src.residual.dataset import Dataset, join
from src.residual.facts import Table, facts_of
from src.spec import (
    Checkpointing,
    Finetune,
    FinetuneKind,
    Gpu,
    Job,
    Layout,
    Method,
    Optimizer,
    Precision,
    Step,
)
from src.units import MIB

MODELS = ("gpt2", "opt-125m", "pythia-160m", "qwen2.5-0.5b", "bloom-560m", "smollm2-135m")
TRUTH = {"libraries_bytes": 700 * MIB, "loss_blocks": 1.3, "unshared": 0.6, "fragmentation": 0.02}
ORIGIN = Origin(
    created="2026-01-02T03:04:05+00:00",
    row_ids=(),
    rows_hash="",
    sources={},
    families={},
    methods={},
    gpus={},
)


def step_of(case: Any) -> Step:
    return parse_case(case).step


@lru_cache(maxsize=512)
def steps(count: int, *, sku: str = "a100-40gb", seed: int = 0) -> tuple[Step, ...]:
    """Different steps of small models on one GPU model."""
    rng = np.random.default_rng(seed)
    gpu = load_gpu(sku)
    return tuple(_step(rng, gpu) for _ in range(count))


def _step(rng: np.random.Generator, gpu: Gpu) -> Step:
    model, _ = resolve_model(str(rng.choice(MODELS)), arch={}, trust_remote_code=False)
    count = int(rng.choice([1, 1, 2, 4]))
    method = Method.SINGLE if count == 1 else Method(str(rng.choice(["fsdp", "ddp"])))
    kind = FinetuneKind(str(rng.choice(["full", "full", "lora"])))
    job = Job(
        model=model,
        finetune=Finetune(kind=kind),
        seq_len=int(rng.choice([256, 512, 1024])),
        precision=Precision(str(rng.choice(["bf16-mixed", "bf16-true"]))),
        optimizer=Optimizer(str(rng.choice(["adamw", "adamw-fused"]))),
        checkpointing=Checkpointing(str(rng.choice(["none", "full"]))),
    )
    return Step(
        job=job,
        method=method,
        layout=Layout(dp=count, shard=count if method is Method.FSDP else 1),
        gpu=gpu,
        micro_batch=int(rng.choice([2, 4, 8, 16])),
    )


def rows_of(
    some: Sequence[Step],
    *,
    noise: float = 0.01,
    seed: int = 0,
    bend: Callable[[str], float] = lambda _: 1.0,
) -> list[Row]:
    """A clean row for each step.

    Args:
        some: the steps.
        noise: standard deviation of the reserved and device levels' log error; a tenth of it lies
            on allocated.
        seed: of the noise.
        bend: level -> a factor on its bytes.
    """
    rng = np.random.default_rng(seed)
    return [_row(step, rng, noise, bend, number) for number, step in enumerate(some)]


def _row(
    step: Step, rng: np.random.Generator, noise: float, bend: Callable[[str], float], number: int
) -> Row:
    facts = facts_of(step, estimate_step(step))
    table = Table.of([facts])
    allocated = facts.formula.allocated * np.exp(rng.normal(0, noise / 10)) * bend("allocated")
    peaks = {"allocated": round(float(allocated))}
    error = np.exp(rng.normal(0, noise))
    for level in ("reserved", "device"):
        size = float(Allocator(level=level, **TRUTH).size(table, np.array([allocated]))[0])
        peaks[level] = round(size * error * bend(level))
    peaks["reserved"] = max(peaks["reserved"], peaks["allocated"])
    peaks["device"] = max(peaks["device"], peaks["reserved"])
    case = json.loads(json.dumps({**case_of(step), "device": "cuda"}))
    return Row(
        case=case,
        outcome=Outcome.OK,
        source=Source.MEASURED,
        provenance=Provenance(
            campaign="known", started="2026-01-02T03:04:05+00:00", duration_s=float(number)
        ),
        comm="none" if step.layout.num_gpus == 1 else "nccl",
        peak_bytes=peaks,
        versions={"torch": "2.13.0"},
    )


def dataset_of(rows: Sequence[Row]) -> Dataset:
    return join(rows, step_of)


def with_peaks(row: Row, **peaks: Any) -> Row:
    return replace(row, peak_bytes={**row.peak_bytes, **peaks})
