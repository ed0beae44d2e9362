"""What is said to have to change where nothing fits really makes something fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from src.errors import UserError
from src.plan import compare
from src.plan.changes import MOST_GPUS, changes_that_fit, single_changes
from src.plan.result import Report
from src.spec import Attention, Checkpointing, Method, Optimizer, Precision, Request, Verdict
from tests.jobs import LORA
from tests.plan_requests import PerMethod, request_of


def words_of(request: Request) -> list[str]:
    return [words for words, _ in single_changes(request)]


def suggested(report: Report) -> list[str]:
    line = next(line for line in report.warnings if line.startswith("nothing fits"))
    if "no single change would" in line:
        return []
    return line.split("any one of these would: ")[1].split(", ")


def test_changes_are_the_cheapest_first() -> None:
    request = request_of(
        gpus=1,
        micro_batch=8,
        methods=(Method.SINGLE,),
        checkpointing=Checkpointing.NONE,
        optimizer=Optimizer.ADAMW,
        seq_len=512,
    )
    gpus = [f"gpus={2**power}" for power in range(1, 11)]
    assert words_of(request) == [
        "micro_batch=1",
        "checkpointing=full",
        "optimizer=adamw-fused",
        "method=all",
        "finetune=lora",
        *gpus,
        "seq_len=256",
        "seq_len=128",
    ]


def test_what_is_so_already_is_no_change() -> None:
    request = request_of(
        gpus=MOST_GPUS, precision=Precision.BF16_TRUE, finetune=LORA, micro_batch=1, seq_len=128
    )
    assert words_of(request) == []


def test_each_change_is_one_setting_and_what_its_words_say() -> None:
    request = request_of(gpus=2, micro_batch=4, optimizer=Optimizer.ADAMW, tp=2, seq_len=300)
    for words, changed in single_changes(request):
        key, value = words.split("=")
        assert changed != request
        found: dict[str, Any] = {
            "micro_batch": changed.micro_batch,
            "optimizer": changed.job.optimizer.value,
            "tp": changed.tp or "null",
            "finetune": changed.job.finetune.kind.value,
            "precision": changed.job.precision.value,
            "gpus": changed.cluster.num_gpus,
            "seq_len": changed.job.seq_len,
        }
        assert str(found[key]) == value


def test_more_gpus_are_whole_nodes() -> None:
    request = request_of(gpus=3)
    counts = [changed.cluster.num_gpus for _, changed in single_changes(request)]
    more = [count for count in counts if count != 3]
    assert more[:2] == [6, 24]
    assert all(count <= 8 or count % 8 == 0 for count in more)


def test_the_smallest_of_each_kind_is_told() -> None:
    request = request_of(gpus=1, seq_len=2048, finetune=LORA, precision=Precision.BF16_TRUE)

    def fits(changed: Request) -> bool:
        return changed.cluster.num_gpus >= 4 or changed.job.seq_len <= 512

    assert changes_that_fit(request, fits) == ("gpus=4", "seq_len=512")
    assert changes_that_fit(request, lambda _: False) == ()


NOTHING_FITS: list[dict[str, Any]] = [
    {"name": "llama-2-7b", "gpus": 1},
    {"name": "llama-2-7b", "gpus": 4, "sku": "v100-16gb", "precision": Precision.FP16_MIXED},
    {"name": "opt-1.3b", "gpus": 1, "sku": "v100-16gb", "precision": Precision.FP32},
    {"name": "opt-1.3b", "gpus": 4, "micro_batch": 512},
    {"name": "opt-1.3b", "gpus": 4, "methods": (Method.DDP,), "sku": "v100-16gb"},
    {
        "name": "opt-125m",
        "gpus": 1,
        "micro_batch": 256,
        "checkpointing": Checkpointing.NONE,
        "attention": Attention.EAGER,
        "seq_len": 1024,
    },
    {
        "name": "mistral-7b-v0.1",
        "gpus": 1,
        "precision": Precision.BF16_TRUE,
        "optimizer": Optimizer.ADAMW,
        "seq_len": 4096,
        "micro_batch": 32,
    },
    {"name": "llama-2-70b", "gpus": 8},
]


@pytest.mark.parametrize("keys", NOTHING_FITS)
def test_after_each_suggested_change_something_fits(keys: dict[str, Any]) -> None:
    asked = request_of(**keys)
    report = compare(asked)
    assert report.recommended is None
    assert not any(row.verdict is Verdict.FITS for row in report.methods)
    changes = dict(single_changes(asked))
    words = suggested(report)
    assert words
    for change in words:
        assert compare(changes[change]).recommended is not None, change
    untold = {
        word for word in changes if word.split("=")[0] not in {w.split("=")[0] for w in words}
    }
    for change in untold:
        assert not any(row.verdict is Verdict.FITS for row in rows_of(changes[change])), change


def rows_of(request: Request) -> tuple:
    """Rows of a request at the micro batch that a search begins with; none if it is impossible."""
    try:
        return compare(replace(request, micro_batch=request.micro_batch or 1)).methods
    except UserError:
        return ()


def test_where_no_single_change_helps_that_is_said() -> None:
    report = compare(request_of(), PerMethod(otherwise=500.0))
    assert report.recommended is None
    line = next(line for line in report.warnings if line.startswith("nothing fits"))
    assert line.endswith("no single change would")
    assert "500.00 GiB" in line


def test_how_much_is_missing_is_told_of_the_method_that_needs_least() -> None:
    report = compare(request_of(), PerMethod({Method.ZERO3: 99.15}, otherwise=500.0))
    line = next(line for line in report.warnings if line.startswith("nothing fits"))
    assert "the least, zero3 at micro_batch=1, needs up to 99.15 GiB" in line
    assert "20.00 GiB more than a100-80gb has" in line
