"""The tables of `from=FILE` know every field of the libraries that are installed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import ClusterConfig
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from src.config.imports import import_files
from src.config.imports.accelerate import ACCELERATE
from src.config.imports.detect import detect
from src.config.imports.reading import read_mapping
from src.config.imports.trainer import TRAINING_ARGUMENTS
from src.config.imports.words import OPTIMIZERS

NO_LONGER_THERE = {"adamw_hf", "muon", "paged_adamw"}


def test_training_arguments_as_transformers_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3)
    file.write_text(arguments.to_json_string())
    assert detect(str(file), read_mapping(str(file), file)) is TRAINING_ARGUMENTS
    imported = import_files(str(file), {})
    assert "not known" not in imported.warnings[0]
    assert imported.values["micro_batch"] == 3
    assert imported.values["checkpointing"] == "none"
    silent = tmp_path / "silent.json"
    silent.write_text(json.dumps({"output_dir": "x"}))
    by_table = import_files(str(silent), {}).values
    assert {"loss": "standard", **by_table, "micro_batch": 3} == imported.values


def test_every_field_of_training_arguments_has_its_place() -> None:
    names = {field.name for field in fields(TrainingArguments)}
    nested = {key.partition(".")[0] for key in TRAINING_ARGUMENTS.rules}
    unknown = {name for name in names - nested if not TRAINING_ARGUMENTS.is_harmless(name)}
    assert unknown == set()


def test_every_field_of_accelerate_has_its_place(tmp_path: Path) -> None:
    nested = {key.partition(".")[0] for key in ACCELERATE.rules}
    names = {field.name for field in fields(ClusterConfig)}
    assert {name for name in names - nested if not ACCELERATE.is_harmless(name)} == set()
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="MULTI_GPU",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=2,
    )
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    imported = import_files(str(file), {})
    assert imported.values == {"gpus": 2, "method": ["ddp"], "precision": "bf16-mixed"}
    assert "not known" not in imported.warnings[0]


def test_every_optimizer_is_one_of_transformers() -> None:
    assert set(OPTIMIZERS) - NO_LONGER_THERE <= {name.value for name in OptimizerNames}
