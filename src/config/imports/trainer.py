"""transformers' TrainingArguments, as `to_json_string` or a script's YAML writes them."""

from __future__ import annotations

from src.config.imports.rules import Format, names
from src.config.imports.words import (
    MODEL,
    TRAINER,
    TRAINER_DEFAULTS,
    TRAINER_HARMLESS,
    TRAINER_HARMLESS_STARTS,
)

TRAINING_ARGUMENTS = Format(
    name="TrainingArguments",
    marks=names("""
        per_device_train_batch_size per_device_eval_batch_size output_dir num_train_epochs
        optim lr_scheduler_type learning_rate gradient_accumulation_steps logging_steps
        save_steps save_strategy eval_strategy max_steps report_to
        """),
    rules={**TRAINER, "model_name_or_path": MODEL},
    harmless=TRAINER_HARMLESS,
    harmless_starts=TRAINER_HARMLESS_STARTS,
    defaults=TRAINER_DEFAULTS,
    caveat="weights are taken to be loaded in fp32 (loaded in bf16: precision=bf16-true)",
)
