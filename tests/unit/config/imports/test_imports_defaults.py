"""What each project takes where a file is silent, or says it its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.import_files import told


def test_the_trainers_defaults_hold_where_its_file_is_silent(tmp_path: Path) -> None:
    keys = told(tmp_path, "a.json", {"output_dir": "x", "learning_rate": 1e-4})
    assert keys["micro_batch"] == 8
    assert keys["checkpointing"] == "none"
    assert keys["precision"] == "fp32"


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("bf16: true", "bf16-true"),
        ("bf16: full", "bf16-true"),
        ("bf16: false", "fp32"),
        ("bf16: false\nfp16: true", "fp16-mixed"),
        ("bf16: true\nfsdp: [full_shard, auto_wrap]", "bf16-mixed"),
        ("fsdp: [full_shard]\nfsdp_version: 2", "bf16-mixed"),
    ],
)
def test_axolotls_precisions(tmp_path: Path, lines: str, precision: str) -> None:
    keys = told(tmp_path, "a.yaml", f"base_model: opt-125m\n{lines}\n")
    assert keys["precision"] == precision


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("finetuning_type: full\nbf16: true", "bf16-mixed"),
        ("finetuning_type: full\nbf16: true\npure_bf16: true", "bf16-true"),
        ("finetuning_type: lora\nbf16: true", "bf16-true"),
        ("finetuning_type: lora\nfp16: true", "bf16-true"),
        ("finetuning_type: full", "fp32"),
    ],
)
def test_llama_factorys_precisions(tmp_path: Path, lines: str, precision: str) -> None:
    assert told(tmp_path, "a.yaml", f"cutoff_len: 64\n{lines}\n")["precision"] == precision


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("", "bf16-mixed"),
        ("bf16: false", "fp32"),
        ("fp16: true", "fp16-mixed"),
        ("dtype: auto", "bf16-true"),
        ("dtype: bfloat16\nbf16: false", "bf16-true"),
    ],
)
def test_trls_precisions(tmp_path: Path, lines: str, precision: str) -> None:
    assert told(tmp_path, "a.yaml", f"dataset_name: a/b\n{lines}\n")["precision"] == precision


def test_fsdp_of_training_arguments(tmp_path: Path) -> None:
    content = {"output_dir": "x", "fsdp": "full_shard auto_wrap offload"}
    keys = told(tmp_path, "a.json", {**content, "fsdp_config": {"activation_checkpointing": True}})
    assert (keys["method"], keys["offload"], keys["checkpointing"]) == (["fsdp"], "all", "full")


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        (2, {"zero.reduce_bucket_size": 768 * 768}),
        (
            3,
            {
                "zero.reduce_bucket_size": 768 * 768,
                "zero.prefetch_bucket_size": int(0.9 * 768 * 768),
                "zero.param_persistence_threshold": 7680,
            },
        ),
    ],
)
def test_auto_sizes_are_those_of_the_trainer(
    tmp_path: Path, stage: int, sizes: dict[str, int]
) -> None:
    content = {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
    }
    keys = told(tmp_path, "ds.json", content, model="opt-125m")
    assert keys == {"method": [f"zero{stage}"], **sizes}
    without = told(tmp_path, "ds.json", content)
    assert without == {"method": [f"zero{stage}"]}


def test_a_batch_over_all_gpus_is_split(tmp_path: Path) -> None:
    content = {"train_batch_size": 48, "gradient_accumulation_steps": 2, "zero_optimization": {}}
    assert told(tmp_path, "ds.json", content, gpus=4)["micro_batch"] == 6
    assert "micro_batch" not in told(tmp_path, "ds.json", content)
