"""Words that several formats share, and what they are here."""

from __future__ import annotations

from src.config.imports.rules import (
    Companion,
    Refuse,
    Rule,
    Take,
    Warn,
    fraction,
    lora_targets,
    names,
    one_of,
    switch,
    text,
    when,
    whole,
    words,
)

OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_hf": "adamw-loop",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw": "paged-adamw",
    "paged_adamw_32bit": "paged-adamw",
    "paged_adamw_8bit": "paged-adamw-8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
"""transformers' `OptimizerNames`; `adamw_torch` takes PyTorch's default, foreach on CUDA."""

ATTENTION = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "kernels_community/flash_attn2": "flash",
    "kernels_community/flash_attn3": "flash",
    "kernels_community/vllm_flash_attn3": "flash",
    "fa2": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
    "disabled": "eager",
    "auto": None,
    "none": None,
}

DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
    "auto": "auto",
}

SHARDING = {
    "full_shard": "fsdp",
    "1": "fsdp",
    "true": "fsdp",
    "shard_grad_op": "fsdp-grad",
    "2": "fsdp-grad",
    "false": "fsdp-grad",
    "no_shard": "ddp",
    "3": "ddp",
    "hybrid_shard": "hsdp",
    "4": "hsdp",
}
"""FSDP's sharding strategy, or whether FSDP2 reshards after the forward pass."""

_OTHER_OPTIMIZER = "not among the optimizers here, type optimizer=... for one that is near; "
_COMPILED = "compiled code keeps other tensors, and is not counted"
NO_CONTEXT_PARALLEL = "the sequence is not split by context parallelism here"

optimizer = one_of(OPTIMIZERS, _OTHER_OPTIMIZER)
attention = one_of(ATTENTION, "not among the kernels here, type attention=...; ")
dtype = one_of(DTYPES)
reshard = one_of(SHARDING, "not among the ways of sharding here, type method=...; ")


def fsdp_options(value: object) -> str | None:
    """The method of TrainingArguments' `fsdp`: words, a list, or a switch."""
    if isinstance(value, bool):
        return "fsdp" if value else None
    options = words(value)
    ways = [name for name in options if name not in ("auto_wrap", "offload")]
    if not options:
        return None
    method = reshard(ways[0]) if ways else "fsdp"
    return f"{method} offload" if "offload" in options else str(method)


def fsdp_rules(*prefixes: str) -> dict[str, Rule]:
    """The keys of an FSDP config below each prefix, with and without their own `fsdp_`."""
    rules: dict[str, Rule] = {
        "sharding_strategy": Take("spread", reshard),
        "reshard_after_forward": Take("reshard", reshard),
        "offload_params": Take("offload", when("all")),
        "cpu_offload": Take("offload", when("all")),
        "activation_checkpointing": Take("fsdp_checkpointing", when("full")),
        "version": Take("fsdp_version", whole),
        "fsdp_version": Take("fsdp_version", whole),
        "min_num_params": Warn("the wrapped unit is taken to be one block"),
    }
    return {
        f"{prefix}{name}": rule
        for prefix in prefixes
        for plain, rule in rules.items()
        for name in {plain, f"fsdp_{plain.removeprefix('fsdp_')}"}
    }


TRAINER: dict[str, Rule] = {
    "per_device_train_batch_size": Take("micro_batch", whole),
    "per_gpu_train_batch_size": Take("micro_batch", whole),
    "gradient_accumulation_steps": Take("grad_accum", whole),
    "gradient_checkpointing": Take("checkpointing", when("full", "none")),
    "activation_checkpointing": Take("checkpointing", when("full", "none")),
    "optim": Take("optimizer", optimizer),
    "bf16": Take("bf16", switch),
    "fp16": Take("fp16", switch),
    "use_liger_kernel": Take("loss", when("liger", "standard")),
    "fsdp": Take("spread", fsdp_options),
    "deepspeed": Companion(),
    "auto_find_batch_size": Warn("the batch size may be halved during the run"),
    "torch_compile": Warn(_COMPILED),
    "label_smoothing_factor": Warn("label smoothing's extra logits are not counted"),
    "neftune_noise_alpha": Warn("NEFTune's noise on the embeddings is not counted"),
    "use_cpu": Refuse("training is on CUDA GPUs here"),
    "no_cuda": Refuse("training is on CUDA GPUs here"),
    "torch_empty_cache_steps": Warn("emptying the cache lowers reserved bytes, not allocated ones"),
    "full_determinism": Warn("deterministic kernels' workspaces are not counted"),
    "optim_target_modules": Warn("optimizers of some modules alone are not counted"),
    "parallelism_config.tp_size": Take("tp", whole),
    "parallelism_config.cp_size": Refuse(NO_CONTEXT_PARALLEL, (1,)),
    "parallelism_config.sp_size": Refuse(NO_CONTEXT_PARALLEL, (1,)),
    **fsdp_rules("fsdp_config."),
}

TRAINER_DEFAULTS = {
    "micro_batch": 8,
    "grad_accum": 1,
    "optimizer": "adamw-fused",
    "checkpointing": "none",
    "autocast": "no",
    "weights": "fp32",
    "adapter": "none",
}
"""transformers 5's, which trains on sequences of whatever length the data has."""

TRAINER_HARMLESS = names("""
        output_dir overwrite_output_dir do_train do_eval do_predict num_train_epochs
        max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
        warmup_ratio optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm tf32 seed data_seed average_tokens_across_devices
        gradient_checkpointing_kwargs activation_checkpointing_kwargs
        torch_compile_backend torch_compile_mode liger_kernel_config use_cache
        prediction_loss_only report_to run_name project trackio_space_id disable_tqdm
        debug skip_memory_metrics per_device_eval_batch_size per_gpu_eval_batch_size
        evaluation_strategy do_eval bf16_full_eval fp16_full_eval batch_eval_metrics
        include_for_metrics include_inputs_for_metrics load_best_model_at_end
        metric_for_best_model greater_is_better ignore_data_skip resume_from_checkpoint
        restore_callback_states_from_checkpoint push_to_hub accelerator_config
        remove_unused_columns label_names group_by_length length_column_name
        train_sampling_strategy local_rank past_index mp_parameters half_precision_backend
        fp16_opt_level fp16_backend jit_mode_eval use_ipex use_mps_device ray_scope
        include_tokens_per_second include_num_input_tokens_seen enable_jit_checkpoint
        split_batches full_determinism_seed torchdynamo tpu_num_cores tpu_metrics_debug
        _n_gpu fsdp_config parallelism_config parallelism_config.dp_replicate_size
        parallelism_config.dp_shard_size use_rslora
        """)
TRAINER_HARMLESS_STARTS = (
    "log_",
    "logging_",
    "eval_",
    "save_",
    "hub_",
    "push_to_hub_",
    "dataloader_",
    "ddp_",
    "trackio_",
    "fsdp_config.",
    "parallelism_config.cp_",
    "parallelism_config.sp_",
)

LORA: dict[str, Rule] = {
    "lora_r": Take("finetune.r", whole),
    "lora_alpha": Take("finetune.alpha", whole),
    "lora_dropout": Take("finetune.dropout", fraction),
    "lora_target_modules": Take("finetune.targets", lora_targets),
    "load_in_4bit": Take("bits4", switch),
    "load_in_8bit": Take("bits8", switch),
    "attn_implementation": Take("attention", attention),
}
_SAVED = "modules that are trained and saved whole are not counted"
LORA_WARNINGS: dict[str, Rule] = {
    "lora_modules_to_save": Warn(_SAVED),
}
MODEL = Take("model", text)
