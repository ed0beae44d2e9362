"""Advice is followed: what is told to fit does, and saves what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from src.estimate import estimate
from src.memory import estimate_step
from src.plan.advice import MOST_LINES, advise
from src.plan.changes import both, faster, leaner
from src.plan.result import Advice, MethodReport
from src.spec import (
    Attention,
    Checkpointing,
    FinetuneKind,
    Offload,
    Optimizer,
    Precision,
    Request,
    Verdict,
)
from src.units import GIB
from tests.jobs import LORA
from tests.plan_requests import request_of

OOM: list[dict[str, Any]] = [
    {"model": "opt-2.7b", "gpus": 4, "gpu": "v100-16gb", "micro_batch": 32},
    {"model": "opt-2.7b", "gpus": 4, "gpu": "v100-16gb", "micro_batch": 16, "method": ["fsdp"]},
    {"model": "opt-2.7b", "gpus": 1, "gpu": "v100-16gb", "seq_len": 512},
    {"model": "llama-2-7b", "gpus": 1},
    {"model": "opt-1.3b", "gpus": 1, "gpu": "v100-16gb", "precision": "fp32"},
    {"model": "opt-125m", "gpus": 1, "micro_batch": 256, "checkpointing": "none", "seq_len": 1024},
    {"model": "llama-2-70b", "gpus": 8, "micro_batch": 4},
]


def keys_of(advice: Advice) -> dict[str, str]:
    """The changes as keyword arguments of `estimate`."""
    return dict(pair.split("=", 1) for pair in advice.changes.split())


def typed(value: str) -> Any:
    if value in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[value]
    return int(value) if value.isdecimal() else value


def row_of(rows: tuple[MethodReport, ...], advice: Advice) -> MethodReport:
    return next(row for row in rows if (row.method, row.layout) == (advice.method, advice.layout))


@pytest.mark.parametrize("keys", OOM, ids=lambda keys: f"{keys['model']}x{keys['gpus']}")
def test_each_piece_of_advice_is_what_following_it_gives(keys: dict[str, Any]) -> None:
    asked = {**keys, "micro_batch": keys.get("micro_batch", 1)}
    report = estimate(**asked)
    assert report.recommended is None
    assert 0 < len(report.advice) <= MOST_LINES
    least = min(row.upper_bytes.device for row in report.methods)
    for advice in report.advice:
        changes = {key: typed(value) for key, value in keys_of(advice).items()}
        followed = estimate(**{**asked, **changes})
        row = row_of(followed.methods, advice)
        assert row.upper_bytes.device == advice.upper_bytes
        assert row.micro_batch == advice.micro_batch
        assert row.verdict is advice.verdict
        assert advice.saved_bytes == least - advice.upper_bytes
    assert report.advice[0].verdict is Verdict.FITS


def test_a_job_that_runs_out_of_memory_on_old_cards_is_told_how_it_fits() -> None:
    report = estimate(model="opt-2.7b", gpus=4, gpu="v100-16gb", seq_len=512, method=["ddp"])
    assert report.recommended is None
    first = report.advice[0]
    assert first.verdict is Verdict.FITS
    assert first.upper_bytes <= report.gpu.usable_bytes
    assert first.saved_bytes > 10 * GIB


def test_what_fits_is_told_what_is_faster_and_fits_too() -> None:
    slow = request_of(
        "opt-1.3b", 1, micro_batch=4, attention=Attention.EAGER, precision=Precision.FP32
    )
    found = advise(slow, estimate_step)
    assert {advice.changes for advice in found} >= {"precision=bf16-mixed", "checkpointing=none"}
    ratios = [advice.time_ratio for advice in found]
    assert ratios == sorted(ratios)
    assert all(ratio < 1 for ratio in ratios)
    assert all(advice.verdict is Verdict.FITS for advice in found)


def test_without_a_micro_batch_the_largest_of_each_counts() -> None:
    found = advise(request_of("opt-1.3b", 4), estimate_step)
    for advice in found:
        assert advice.micro_batch > 1
        assert advice.upper_bytes <= request_of().cluster.gpu.usable_bytes


def changes_of(request: Request) -> list[str]:
    return [change.words for change in leaner(request)]


def test_a_smaller_batch_keeps_the_batch_in_all() -> None:
    request = request_of(micro_batch=12, grad_accum=2)
    words = [words for words in changes_of(request) if words.startswith("micro_batch")]
    assert words == [
        "micro_batch=6 grad_accum=4",
        "micro_batch=4 grad_accum=6",
        "micro_batch=3 grad_accum=8",
        "micro_batch=2 grad_accum=12",
        "micro_batch=1 grad_accum=24",
    ]


def test_what_is_so_already_is_no_change() -> None:
    qlora = replace(LORA, kind=FinetuneKind.QLORA)
    request = request_of(
        gpus=4,
        precision=Precision.BF16_TRUE,
        finetune=qlora,
        micro_batch=1,
        seq_len=128,
        optimizer=Optimizer.SGD,
        offload=Offload.ALL,
        activation_offload=True,
        loss="liger",
    )
    assert {change.kind for change in leaner(request)} == {"gpus"}


def test_more_gpus_are_one_more_or_whole_nodes() -> None:
    counts = [
        change.request.cluster.num_gpus
        for change in leaner(request_of(gpus=3))
        if change.kind == "gpus"
    ]
    assert counts[:3] == [4, 6, 24]
    assert all(count <= 8 or count % 8 == 0 for count in counts)


def test_two_changes_together_keep_both() -> None:
    request = request_of(micro_batch=4, checkpointing=Checkpointing.NONE)
    changes = {change.words: change for change in leaner(request)}
    first, second = changes["micro_batch=2 grad_accum=2"], changes["checkpointing=full"]
    for pair in (both(first, second, request), both(second, first, request)):
        assert pair is not None
        assert pair.request.micro_batch == 2
        assert pair.request.job.grad_accum == 2
        assert pair.request.job.checkpointing is Checkpointing.FULL
    assert both(first, changes["micro_batch=1 grad_accum=4"], request) is None


def test_pairs_are_told_where_no_single_change_is_enough() -> None:
    request = request_of("llama-2-13b", 1, sku="rtx-3090", micro_batch=1, seq_len=2048)
    found = advise(request, estimate_step)
    assert found
    fits = [advice for advice in found if advice.verdict is Verdict.FITS]
    assert fits == list(found) or not fits


def test_faster_changes_undo_what_saves_memory() -> None:
    request = request_of(
        checkpointing=Checkpointing.FULL, offload=Offload.ALL, activation_offload=True
    )
    words = [change.words for change in faster(request)]
    assert words[:3] == ["offload=none", "activation_offload=false", "checkpointing=none"]
