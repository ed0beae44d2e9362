"""TRL's command-line YAML for supervised fine-tuning: TrainingArguments, ModelConfig, SFTConfig."""

from __future__ import annotations

from src.config.imports.rules import (
    Format,
    Refuse,
    Rule,
    Take,
    Warn,
    names,
    one_of,
    switch,
    when,
    whole,
)
from src.config.imports.words import (
    LORA,
    LORA_WARNINGS,
    MODEL,
    TRAINER,
    TRAINER_DEFAULTS,
    TRAINER_HARMLESS,
    TRAINER_HARMLESS_STARTS,
    dtype,
)

_OTHER_TRAINER = "only supervised fine-tuning: a second model or generated samples are not counted"
_PREFERENCE = names("""
        beta num_generations max_prompt_length max_completion_length ref_model
        reward_model_path reward_model_name_or_path reward_funcs sft_model_path
        precompute_ref_log_probs generate_during_eval use_vllm vllm_mode
        """)

_RULES: dict[str, Rule] = {
    **TRAINER,
    **LORA,
    **LORA_WARNINGS,
    "model_name_or_path": MODEL,
    "dtype": Take("weights", dtype),
    "torch_dtype": Take("weights", dtype),
    "model_init_kwargs.dtype": Take("weights", dtype),
    "model_init_kwargs.torch_dtype": Take("weights", dtype),
    "model_init_kwargs.attn_implementation": LORA["attn_implementation"],
    "use_flash_attention_2": Take("attention", when("flash")),
    "use_peft": Take("adapter", when("lora", "none")),
    "use_dora": Take("finetune.dora", switch),
    "bnb_4bit_quant_type": Take("quant_type", one_of({"nf4": "nf4"}, "FP4 is not here; ")),
    "use_bnb_nested_quant": Take("finetune.double_quant", switch),
    "max_length": Take("seq_len", whole),
    "max_seq_length": Take("seq_len", whole),
    "loss_type": Take(
        "loss", one_of({"nll": "standard", "chunked_nll": "chunked"}, "another loss; ")
    ),
    "activation_offloading": Take("activation_offload", switch),
    "packing": Warn("every sequence is taken to have the full length, which packing comes to"),
    "padding_free": Warn("sequences are counted padded to the full length"),
    **{name: Refuse(_OTHER_TRAINER) for name in _PREFERENCE},
}

TRL = Format(
    name="TRL",
    marks=names("""
        dataset_name dataset_text_field max_seq_length max_length use_peft packing
        packing_strategy completion_only_loss assistant_only_loss
        chat_template_path loss_type padding_free dataset_kwargs
        bnb_4bit_quant_type use_bnb_nested_quant lora_task_type dataset_train_split
        dataset_test_split
        """)
    | {name for name in _PREFERENCE if name != "beta"},
    rules=_RULES,
    harmless=TRAINER_HARMLESS
    | names("""
        dataset_name dataset_config dataset_text_field dataset_train_split
        dataset_test_split dataset_streaming dataset_num_proc dataset_kwargs
        dataset_batch_size datasets eos_token pad_token model_revision model_code_revision
        base_model_revision chat_template_path packing_strategy eval_packing
        pad_to_multiple_of truncation_mode shuffle_dataset completion_only_loss
        assistant_only_loss lora_task_type bnb_4bit_quant_storage
        gradient_checkpointing_use_reentrant ignore_bias_buffers model_init_kwargs
        """),
    harmless_starts=TRAINER_HARMLESS_STARTS,
    defaults={
        **TRAINER_DEFAULTS,
        "checkpointing": "full",
        "bf16": True,
        "seq_len": 1024,
        "finetune.r": 16,
        "finetune.alpha": 32,
        "finetune.dropout": 0.05,
        "finetune.double_quant": False,
        "finetune.upcast": "norms",
    },
    caveat="the loss is the whole one where loss_type is not set (recent versions: loss=chunked)",
)
