"""Published tables as rows: what is understood becomes one, everything else is told by id."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from src.config.published import COLUMNS, read_published
from src.errors import UserError
from src.measure.case import parse_case
from src.record import Outcome, Row, Source
from src.spec import Checkpointing, FinetuneKind, Loss, Method, Optimizer, Precision, Upcast
from src.units import MIB

LINE = {
    "id": "fms-033",
    "source_url": "https://example.org/bytes.csv#L34",
    "date_or_version": "2025-02 (c959c6b)",
    "gpu_model": "A100-80GB",
    "gpu_count": "1",
    "framework": "torch 2.4.1; transformers 4.48.1; peft 0.13.2; flash-attn 2.7.3",
    "model_id": "mistralai/Mistral-7B-v0.1",
    "method": "single",
    "finetune": "lora r16 alpha16 dropout0.1 q,k,v,o",
    "precision": "pure-bf16 (bf16 weights, no autocast flag)",
    "optimizer": "adamw_torch (foreach)",
    "micro_batch_per_gpu": "4",
    "seq_len": "4096",
    "grad_checkpointing": "full",
    "attention": "flash_attention_2",
    "compile": "no",
    "cpu_offload": "no",
    "other": "packed sequences",
    "measured_metric": "max_memory_allocated",
    "unit": "bytes",
    "measured_value": "26704571904",
    "outcome": "fits",
    "confidence": "high",
    "notes": "also nvidia-smi memory.used peak (mean over GPUs, start baseline removed) 29576 MiB",
}


def table(folder: Path, *lines: dict[str, str]) -> Path:
    path = folder / "published.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    return path


def only_row(folder: Path, **changes: str) -> Row:
    found = read_published(table(folder, LINE | changes))
    assert not found.refused
    return found.rows[0]


def test_a_line_as_a_row(tmp_path: Path) -> None:
    row = only_row(tmp_path)
    assert row.source is Source.PUBLISHED
    assert row.outcome is Outcome.OK
    assert row.peak_bytes == {"allocated": 26704571904, "device": 29576 * MIB}
    assert row.provenance.url == LINE["source_url"]
    assert row.provenance.started == "2025-02-01T00:00:00+00:00"
    assert row.versions["transformers"] == "4.48.1"
    assert row.environment["id"] == "fms-033"
    assert Row.from_json(row.to_json()) == row
    step = parse_case(row.case).step
    job = step.job
    assert (step.method, step.micro_batch, job.seq_len) == (Method.SINGLE, 4, 4096)
    assert job.model.name == "mistral-7b-v0.1"
    assert job.finetune.kind is FinetuneKind.LORA
    assert (job.finetune.r, job.finetune.targets, job.finetune.dropout) == (16, (), 0.1)
    assert job.precision is Precision.BF16_TRUE
    assert job.optimizer is Optimizer.ADAMW
    assert job.checkpointing is Checkpointing.FULL
    assert job.loss is Loss.STANDARD_4X
    assert parse_case(row.case).loop.reentrant_checkpointing


def test_fsdp1_is_fsdp_with_another_loop(tmp_path: Path) -> None:
    row = only_row(tmp_path, method="fsdp1-full-shard (BACKWARD_PRE, no offload)", gpu_count="2")
    case = parse_case(row.case)
    assert case.step.method is Method.FSDP
    assert (case.step.layout.dp, case.step.layout.shard) == (2, 2)
    assert case.loop.fsdp1
    assert row.comm == "nccl"


def test_quantised_models_say_how_they_are_prepared(tmp_path: Path) -> None:
    words = "qlora nf4 r16 alpha16 dropout0.1 q,k,v,o (no double quant stated)"
    plain = only_row(tmp_path, finetune=words)
    prepared = "prepare_model_for_kbit_training upcasts non-quantised params to fp32"
    upcast = only_row(tmp_path, finetune=words, other=prepared)
    assert parse_case(plain.case).step.job.finetune.kind is FinetuneKind.QLORA
    assert parse_case(plain.case).step.job.finetune.upcast is Upcast.NONE
    assert parse_case(upcast.case).step.job.finetune.upcast is Upcast.NORMS


@pytest.mark.parametrize(
    ("version", "loss"),
    [("4.48.1", Loss.STANDARD_4X), ("4.49.0", Loss.STANDARD), ("5.13.1", Loss.STANDARD)],
)
def test_the_loss_is_that_of_the_version(tmp_path: Path, version: str, loss: Loss) -> None:
    row = only_row(tmp_path, framework=f"torch 2.13.0; transformers {version}")
    assert parse_case(row.case).step.job.loss is loss


@pytest.mark.parametrize(
    ("unit", "value", "num_bytes"),
    [("GiB", "2", 2**31), ("MiB", "3915", 3915 * MIB), ("GB(1e9)", "1.5", 1_500_000_000)],
)
def test_units(tmp_path: Path, unit: str, value: str, num_bytes: int) -> None:
    row = only_row(tmp_path, unit=unit, measured_value=value, notes="")
    assert row.peak_bytes == {"allocated": num_bytes}


def test_an_assumption_is_noted(tmp_path: Path) -> None:
    row = only_row(tmp_path, attention="sdpa/eager unknown")
    assert any("not stated" in note for note in row.notes)


def test_out_of_memory_has_no_peak(tmp_path: Path) -> None:
    changes = {
        "outcome": "oom",
        "measured_metric": "outcome-only",
        "measured_value": "",
        "unit": "",
    }
    row = only_row(tmp_path, **changes)
    assert row.outcome is Outcome.OOM
    assert row.peak_bytes == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("measured_value", "nan"),
        ("measured_value", "-5"),
        ("measured_value", "0"),
        ("measured_value", "about 20"),
        ("measured_value", ""),
        ("measured_value", "inf"),
        ("unit", "GB"),
        ("unit", ""),
        ("measured_metric", "unspecified (probably nvidia-smi)"),
        ("measured_metric", "outcome-only"),
        ("outcome", "maybe"),
        ("seq_len", "alpaca (variable)"),
        ("seq_len", "0"),
        ("micro_batch_per_gpu", "1 (assumed)"),
        ("gpu_model", "80GB class GPU"),
        ("gpu_count", ""),
        ("model_id", "someone/else"),
        ("framework", "litgpt main 2024; torch 2.2-2.4"),
        ("method", "fsdp2 4 x tp 2"),
        ("finetune", "gptq-lora int4 r16 alpha16 dropout0.1 q,k,v,o"),
        ("finetune", "lora r8 c_attn"),
        ("precision", "bf16"),
        ("optimizer", "AdamW"),
        ("grad_checkpointing", "selective"),
        ("attention", "sdpa/flex"),
        ("compile", "yes"),
        ("cpu_offload", "optimizer"),
        ("other", "foak fused kernels (fast CE loss, RMSNorm, RoPE); packed sequences"),
        ("confidence", "low"),
        ("date_or_version", "lately"),
        ("source_url", ""),
    ],
)
def test_what_is_not_understood_is_refused_by_id(tmp_path: Path, key: str, value: str) -> None:
    good = LINE | {"id": "good"}
    found = read_published(table(tmp_path, LINE | {key: value}, good))
    assert [row.environment["id"] for row in found.rows] == ["good"]
    assert [line.id for line in found.refused] == ["fms-033"]
    told = "source" if key == "source_url" else key
    assert found.refused[0].reason.startswith(f"{told}=")


def test_an_id_counts_once_and_none_gets_lost(tmp_path: Path) -> None:
    found = read_published(table(tmp_path, LINE, LINE, LINE | {"id": ""}))
    assert len(found.rows) == 2
    assert [(line.id, line.reason) for line in found.refused] == [
        ("fms-033", "id=fms-033: the same id twice")
    ]


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"import=.*cannot be read"):
        read_published(tmp_path / "nowhere.csv")
    other = tmp_path / "other.csv"
    other.write_text("id,value\n1,2\n")
    with pytest.raises(UserError, match="has no columns source_url"):
        read_published(other)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="import="):
        read_published(binary)


def test_experts_that_were_quantised_then_are_refused(tmp_path: Path) -> None:
    words = "qlora nf4 r16 alpha16 dropout0.1 q,k,v,o (no double quant stated)"
    mixture = {"model_id": "mistralai/Mixtral-8x7B-Instruct-v0.1", "finetune": words}
    found = read_published(table(tmp_path, LINE | mixture))
    assert not found.rows
    assert "now they are stacked" in found.refused[0].reason
    plain = only_row(tmp_path, model_id=mixture["model_id"])
    assert plain.case["model"]["name"] == "mixtral-8x7b"
