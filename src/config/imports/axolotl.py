"""axolotl's YAML."""

from __future__ import annotations

from typing import Any

from src.config.imports.rules import (
    Companion,
    Format,
    NotRepresentedError,
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
    NO_CONTEXT_PARALLEL,
    TRAINER,
    TRAINER_HARMLESS,
    TRAINER_HARMLESS_STARTS,
    fsdp_options,
    fsdp_rules,
    optimizer,
)


def _half(value: Any) -> str:
    """`bf16`: a switch, `auto` (where the GPU has it), or `full` (no autocast)."""
    if value == "full":
        return "full"
    return "bf16" if value == "auto" or switch(value) else "no"


def _checkpointing(value: Any) -> str:
    if value in ("unsloth", "offload", "offload_disk"):
        raise NotRepresentedError(
            "checkpoints in host memory are not counted; checkpointing=full, or "
            "activation_offload=true for all that is kept"
        )
    return "full" if switch(value) else "none"


def _no_kernel(value: Any) -> None:
    if switch(value):
        raise NotRepresentedError("not among the kernels here, type attention=flash or sdpa")


_RL = "only supervised fine-tuning: a second model or generated samples are not counted"
_PART = "parameters chosen by name are not trained alone here; type finetune=freeze or full"

_RULES: dict[str, Rule] = {
    **LORA,
    **LORA_WARNINGS,
    "base_model": MODEL,
    "adapter": Take("adapter", one_of({"lora": "lora", "qlora": "lora", "": "none"})),
    "lora_target_linear": Take("all_linear", switch),
    "peft_use_dora": Take("finetune.dora", switch),
    "sequence_len": Take("seq_len", whole),
    "micro_batch_size": Take("micro_batch", whole),
    "gradient_accumulation_steps": TRAINER["gradient_accumulation_steps"],
    "batch_size": Take("global_batch", whole),
    "gradient_checkpointing": Take("checkpointing", _checkpointing),
    "activation_offloading": Take("activation_offload", switch),
    "optimizer": Take("optimizer", optimizer),
    "bf16": Take("half", _half),
    "bfloat16": Take("half", when("full")),
    "fp16": Take("fp16", switch),
    "float16": Take("fp16", switch),
    "flash_attention": Take("attention", when("flash")),
    "sdp_attention": Take("attention", when("sdpa")),
    "eager_attention": Take("attention", when("eager")),
    "flex_attention": Take("attention", _no_kernel),
    "xformers_attention": Take("attention", _no_kernel),
    "deepspeed": Companion(),
    "fsdp": Take("spread", fsdp_options),
    "fsdp_version": Take("fsdp_version", whole),
    **fsdp_rules("fsdp_config."),
    "tensor_parallel_size": Take("tp", whole),
    "context_parallel_size": Refuse(NO_CONTEXT_PARALLEL, (1,)),
    "sequence_parallel_degree": Refuse(NO_CONTEXT_PARALLEL, (1,)),
    "liger_fused_linear_cross_entropy": Take("loss", when("liger")),
    "cut_cross_entropy": Take("loss", when("liger")),
    "chunked_cross_entropy": Take("loss", when("chunked")),
    "rl": Refuse(_RL),
    "reward_model": Refuse(_RL),
    "process_reward_model": Refuse(_RL),
    "unfrozen_parameters": Refuse(_PART),
    "sample_packing": Warn("packed sequences are counted as one of the full length"),
    "processor_type": Warn("only the language model is counted, no vision tower"),
    "torch_compile": TRAINER["torch_compile"],
    "relora": Warn("ReLoRA's merges are not counted"),
    "neftune_noise_alpha": TRAINER["neftune_noise_alpha"],
    "noisy_embedding_alpha": TRAINER["neftune_noise_alpha"],
    "lora_mlp_kernel": Warn("axolotl's LoRA kernels keep less than PEFT's code, which is counted"),
    "lora_qkv_kernel": Warn("axolotl's LoRA kernels keep less than PEFT's code, which is counted"),
    "lora_o_kernel": Warn("axolotl's LoRA kernels keep less than PEFT's code, which is counted"),
    "lora_on_cpu": Warn("adapters are counted on the GPU"),
    "gptq": Refuse("GPTQ weights are not here; finetune=qlora stores nf4 or int8"),
    "fp8": Refuse("fp8 is not among the precisions"),
}

AXOLOTL = Format(
    name="axolotl",
    marks=names("""
        base_model micro_batch_size sequence_len adapter sample_packing val_set_size
        lora_target_linear lora_model_dir pad_to_sequence_len dataset_prepared_path
        eval_sample_packing base_model_config tokenizer_type train_on_inputs
        saves_per_epoch evals_per_epoch num_epochs special_tokens
        """),
    rules=_RULES,
    harmless=TRAINER_HARMLESS
    | names("""
        base_model_config base_model_ignore_patterns model_type tokenizer_type
        tokenizer_config tokenizer_use_fast tokenizer_legacy is_llama_derived_model
        is_mistral_derived_model is_falcon_derived_model strict datasets test_datasets
        dataset_prepared_path val_set_size dataset_processes shuffle_merged_datasets
        chat_template default_system_message pad_to_sequence_len eval_sample_packing
        sample_packing_group_size sample_packing_bin_size lora_model_dir
        lora_fan_in_fan_out num_epochs lr_scheduler cosine_min_lr_ratio plugins
        train_on_inputs group_by_length early_stopping_patience resume_from_checkpoint
        auto_resume_from_checkpoints saves_per_epoch evals_per_epoch special_tokens tokens
        added_tokens_overrides liger_rope liger_rms_norm liger_layer_norm liger_swiglu
        liger_glu_activation liger_cross_entropy s2_attention flash_attn_fuse_qkv debug
        flash_attn_fuse_mlp flash_attn_cross_entropy flash_attn_rms_norm xpos_rope
        profiler_steps remove_unused_columns revision_of_model skip_prepare_dataset
        streaming ddp_timeout dp_shard_size dp_replicate_size excess_length_strategy
        loraplus_lr_ratio roles_to_train train_on_eos embeddings_skip_upcast gc_steps
        torch_compile_backend use_wandb peft_use_rslora
        """),
    harmless_starts=(*TRAINER_HARMLESS_STARTS, "wandb_", "mlflow_", "comet_", "dataset_"),
    defaults={
        "micro_batch": 1,
        "grad_accum": 1,
        "seq_len": 512,
        "optimizer": "adamw-fused",
        "checkpointing": "none",
        "half": "bf16",
        "adapter": "none",
        "finetune.double_quant": True,
    },
)
