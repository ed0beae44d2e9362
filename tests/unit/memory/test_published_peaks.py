"""Peaks that others measured on A100-80 GB cards and published.

Source: the benchmark files of fms-acceleration (Apache-2.0), torch 2.4.1, transformers 4.45 and
4.48, `torch.cuda.max_memory_allocated`. A peak in the optimizer's step is weights, gradients,
states and the optimizer's copy, so it does not depend on transformers' version; peaks of the loss
do (4.x keeps a shifted fp32 copy of the logits), and are left to the dry run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.memory import Instant, estimate_step
from src.spec import Attention, Checkpointing, Job, Method, Optimizer, Precision, Step
from tests.jobs import LORA, step_of, zoo_model

PUBLISHED = Path(__file__).parents[4] / "shared" / "measurements" / "published.csv"
MODELS = {
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "bigcode/gpt_bigcode-santacoder": "gpt_bigcode-santacoder",
}
JOB = Job(
    model=zoo_model("mistral-7b-v0.1"),
    seq_len=4096,
    optimizer=Optimizer.ADAMW,
    attention=Attention.FLASH,
)


@pytest.mark.parametrize(
    ("precision", "gpus", "micro_batch", "published"),
    [
        ("bf16-true", 1, 4, 72_434_837_504),
        ("bf16-true", 1, 8, 72_435_230_720),
        ("bf16-true", 2, 2, 36_225_939_968),
        ("bf16-true", 2, 4, 36_226_136_576),
        ("bf16-mixed", 2, 4, 72_434_853_888),
        ("bf16-mixed", 2, 8, 72_435_247_104),
        ("bf16-mixed", 4, 4, 36_226_152_448),
    ],
)
def test_mistral_7b(precision: str, gpus: int, micro_batch: int, published: int) -> None:
    job = replace(JOB, precision=Precision(precision))
    method = Method.SINGLE if gpus == 1 else Method.FSDP
    estimate = estimate_step(step_of(job, method, gpus=gpus, micro_batch=micro_batch))
    assert estimate.peak_instant is Instant.OPTIMIZER_STEP
    assert estimate.peak_bytes.allocated == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(
    ("micro_batch", "changes", "replayed"),
    [
        (1, {"checkpointing": Checkpointing.NONE}, 45.4e9),
        (1, {}, 17.4e9),
        (4, {"attention": Attention.EAGER}, 46.8e9),
    ],
)
def test_mistral_7b_with_lora(micro_batch: int, changes: dict[str, Any], replayed: float) -> None:
    """Replays of the published LoRA run (r 16 on q, k, v, o; dropout 0.1), one switch at a time."""
    finetune = replace(LORA, dropout=0.1)
    job = replace(JOB, precision=Precision.BF16_TRUE, finetune=finetune, **changes)
    peak = estimate_step(step_of(job, micro_batch=micro_batch)).peak_bytes.allocated
    assert peak == pytest.approx(replayed, rel=0.01)


def _step(row: dict[str, str]) -> Step | None:
    """The step of a published row that the formula's keys can express, else None."""
    is_full = row["finetune"] == "full" and row["optimizer"] == "adamw_torch (foreach)"
    if not is_full or row["model_id"] not in MODELS or row["unit"] != "bytes":
        return None
    if row["measured_metric"] != "max_memory_allocated":
        return None
    job: dict[str, Any] = {"model": zoo_model(MODELS[row["model_id"]])}
    single = row["method"] == "single"
    mixed = row["precision"].startswith("amp-bf16")
    job["precision"] = Precision.BF16_MIXED if mixed else Precision.BF16_TRUE
    return step_of(
        replace(JOB, seq_len=int(row["seq_len"]), **job),
        Method.SINGLE if single else Method.FSDP,
        gpus=int(row["gpu_count"]),
        micro_batch=int(row["micro_batch_per_gpu"]),
    )


def _rows() -> Iterator[tuple[str, Step, float]]:
    for row in csv.DictReader(PUBLISHED.read_text().splitlines()):
        step = _step(row)
        if step is not None:
            yield row["id"], step, float(row["measured_value"])


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published rows are not here")
def test_every_published_peak_of_the_optimizers_step() -> None:
    seen = 0
    for name, step, published in _rows():
        estimate = estimate_step(step)
        if estimate.peak_instant is Instant.OPTIMIZER_STEP:
            seen += 1
            assert estimate.peak_bytes.allocated == pytest.approx(published, rel=1e-4), name
    assert seen >= 15


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published rows are not here")
def test_a_peak_is_never_below_what_the_optimizers_step_took() -> None:
    """Whatever sets the peak, published bytes hold at least the optimizer's step."""
    for name, step, published in _rows():
        cells = estimate_step(step).ledger[Instant.OPTIMIZER_STEP]
        assert sum(cells.values()) <= published * 1.001, name
