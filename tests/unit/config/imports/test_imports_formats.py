"""One configuration in the style of each project, and what it is in our keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src.config.imports import import_files
from src.config.imports.detect import FORMATS, detect
from src.config.imports.reading import read_mapping
from tests.import_files import write

TRAINER = {
    "output_dir": "runs/a",
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "gradient_checkpointing": True,
    "learning_rate": 3e-5,
    "num_train_epochs": 2.0,
    "optim": "paged_adamw_8bit",
    "bf16": True,
    "fp16": False,
    "warmup_ratio": 0.05,
    "logging_steps": 20,
    "report_to": ["none"],
    "deepspeed": None,
}
ACCELERATE_FSDP1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_activation_checkpointing: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 12
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""
ACCELERATE_FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_cpu_ram_efficient_loading: true
mixed_precision: bf16
num_machines: 1
num_processes: 6
"""
ACCELERATE_ZERO = """
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 5
  zero3_init_flag: true
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
DEEPSPEED = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 3e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "data_types": {"grad_accum_dtype": "fp32"},
    "train_micro_batch_size_per_gpu": 7,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
}
TRL = """
model_name_or_path: facebook/opt-1.3b
dataset_name: some/set
dtype: bfloat16
attn_implementation: flash_attention_2
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 1536
use_peft: true
lora_r: 24
lora_alpha: 12
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
learning_rate: 1.0e-4
packing: true
"""
AXOLOTL = """
base_model: mistralai/Mistral-7B-v0.1
load_in_8bit: false
load_in_4bit: false
adapter: lora
lora_r: 48
lora_alpha: 24
lora_dropout: 0.1
lora_target_linear: true
datasets:
  - path: some/set
    type: alpaca
val_set_size: 0.02
sequence_len: 3072
sample_packing: true
micro_batch_size: 3
gradient_accumulation_steps: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0001
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 12
lora_target: all
dataset: a,b
template: llama3
cutoff_len: 1280
overwrite_cache: true
preprocessing_num_workers: 8
output_dir: saves/x
per_device_train_batch_size: 3
gradient_accumulation_steps: 6
learning_rate: 5.0e-5
flash_attn: fa2
bf16: true
ddp_timeout: 180000
"""


EXPECTED: list[tuple[str, Any, str, dict[str, Any]]] = [
    (
        "args.json",
        TRAINER,
        "TrainingArguments",
        {
            "micro_batch": 6,
            "grad_accum": 3,
            "checkpointing": "full",
            "optimizer": "paged-adamw-8bit",
            "precision": "bf16-mixed",
            "finetune": "full",
        },
    ),
    (
        "fsdp1.yaml",
        ACCELERATE_FSDP1,
        "accelerate",
        {
            "gpus": 12,
            "gpus_per_node": 6,
            "method": ["fsdp-grad"],
            "offload": "all",
            "checkpointing": "full",
            "precision": "fp16-mixed",
        },
    ),
    (
        "fsdp2.yaml",
        ACCELERATE_FSDP2,
        "accelerate",
        {"gpus": 6, "method": ["fsdp"], "precision": "bf16-mixed"},
    ),
    (
        "zero.yaml",
        ACCELERATE_ZERO,
        "accelerate",
        {
            "gpus": 4,
            "method": ["zero3"],
            "offload": "optimizer",
            "grad_accum": 5,
            "precision": "bf16-mixed",
        },
    ),
    (
        "multi.yaml",
        "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 1\nmixed_precision: 'no'\n",
        "accelerate",
        {"gpus": 4, "method": ["ddp"], "precision": "fp32"},
    ),
    (
        "ds.json",
        DEEPSPEED,
        "DeepSpeed",
        {
            "method": ["zero2"],
            "offload": "optimizer",
            "optimizer": "adamw-fused",
            "zero.reduce_bucket_size": 300_000_000,
            "zero.fp32_gradients": True,
            "micro_batch": 7,
            "grad_accum": 2,
            "precision": "bf16-mixed",
        },
    ),
    (
        "sft.yaml",
        TRL,
        "TRL",
        {
            "model": "facebook/opt-1.3b",
            "attention": "flash",
            "micro_batch": 2,
            "grad_accum": 4,
            "seq_len": 1536,
            "optimizer": "adamw-fused",
            "checkpointing": "full",
            "finetune": "qlora",
            "finetune.r": 24,
            "finetune.alpha": 12,
            "finetune.dropout": 0.05,
            "finetune.targets": ["q_proj", "v_proj"],
            "finetune.double_quant": False,
            "finetune.upcast": "norms",
            "precision": "bf16-true",
        },
    ),
    (
        "axolotl.yml",
        AXOLOTL,
        "axolotl",
        {
            "model": "mistralai/Mistral-7B-v0.1",
            "attention": "flash",
            "micro_batch": 3,
            "grad_accum": 2,
            "seq_len": 3072,
            "optimizer": "adamw-8bit",
            "checkpointing": "full",
            "finetune": "lora",
            "finetune.r": 48,
            "finetune.alpha": 24,
            "finetune.dropout": 0.1,
            "finetune.targets": ["all-linear"],
            "precision": "bf16-true",
        },
    ),
    (
        "lf.yaml",
        LLAMA_FACTORY,
        "LLaMA-Factory",
        {
            "model": "meta-llama/Meta-Llama-3-8B",
            "attention": "flash",
            "micro_batch": 3,
            "grad_accum": 6,
            "seq_len": 1280,
            "optimizer": "adamw-fused",
            "checkpointing": "full",
            "finetune": "lora",
            "finetune.r": 12,
            "finetune.dropout": 0.0,
            "finetune.targets": ["all-linear"],
            "precision": "bf16-true",
        },
    ),
]


@pytest.mark.parametrize(("name", "content", "kind", "keys"), EXPECTED)
def test_a_configuration_in_our_keys(
    tmp_path: Path, name: str, content: Any, kind: str, keys: dict[str, Any]
) -> None:
    file = write(tmp_path, name, content)
    assert detect(file, read_mapping(file, Path(file))).name == kind
    assert import_files(file, {}).values == keys


@pytest.mark.parametrize(("name", "content", "kind"), [row[:3] for row in EXPECTED])
def test_every_key_is_told_and_known(tmp_path: Path, name: str, content: Any, kind: str) -> None:
    file = write(tmp_path, name, content)
    (line,) = [one for one in import_files(file, {}).warnings if f"({kind})" in one]
    assert "not known" not in line
    told_words = line.partition("took ")[2].replace(",", " ").replace(";", " ").split()
    for key in read_mapping(file, Path(file)):
        assert any(word == key or word.startswith(f"{key}.") for word in told_words), key


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_tables_do_not_contradict_themselves(form: Any) -> None:
    assert not form.harmless & set(form.rules)
    others = {key for key in form.marks if key not in form.rules and not form.is_harmless(key)}
    starts = {key for key in form.rules if key.partition(".")[0] in others}
    assert {key.partition(".")[0] for key in starts} == others


def test_an_unknown_key_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", AXOLOTL + "brand_new_option: 3\n")
    assert "brand_new_option (not known)" in import_files(file, {}).warnings[0]
