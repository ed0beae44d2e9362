"""LLaMA-Factory's YAML."""

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
    MODEL,
    TRAINER,
    TRAINER_DEFAULTS,
    TRAINER_HARMLESS,
    TRAINER_HARMLESS_STARTS,
    attention,
)

_STAGES = {"sft": "sft", "pt": "pt"}
_OTHER_STAGE = "a second model, pairs or generated samples are not counted; "
_KINDS = {"lora": "lora", "full": "none", "freeze": "freeze"}
_BITS = {"4": 4, "8": 8}
_SHRUNK = "it keeps other tensors than the optimizers here; type finetune and optimizer alone"
_UNSLOTH = "Unsloth's kernels keep less than PyTorch's, which are counted"

_RULES: dict[str, Rule] = {
    **TRAINER,
    "model_name_or_path": MODEL,
    "stage": Take("stage", one_of(_STAGES, _OTHER_STAGE)),
    "finetuning_type": Take("adapter", one_of(_KINDS)),
    "freeze_trainable_layers": Take("finetune.trained_blocks", whole),
    "freeze_extra_modules": Warn("only blocks are counted as trained"),
    "lora_rank": Take("finetune.r", whole),
    "lora_alpha": LORA["lora_alpha"],
    "lora_dropout": LORA["lora_dropout"],
    "lora_target": LORA["lora_target_modules"],
    "use_dora": Take("finetune.dora", switch),
    "pissa_init": Warn("PiSSA's first decomposition is not counted"),
    "additional_target": Warn("modules that are trained and saved whole are not counted"),
    "quantization_bit": Take("bits", one_of(_BITS, "2, 3, 5 and 6 bits are not here; ")),
    "quantization_type": Take("quant_type", one_of({"nf4": "nf4"}, "FP4 is not here; ")),
    "quantization_method": Take(
        "quant_method", one_of({"bnb": "bnb", "bitsandbytes": "bnb"}, "only bitsandbytes; ")
    ),
    "double_quantization": Take("finetune.double_quant", switch),
    "upcast_layernorm": Take("finetune.upcast", when("norms", "none")),
    "pure_bf16": Take("pure", switch),
    "cutoff_len": Take("seq_len", whole),
    "flash_attn": Take("attention", attention),
    "disable_gradient_checkpointing": Take("checkpointing", when("none", "full")),
    "enable_liger_kernel": Take("loss", when("liger", "standard")),
    "use_unsloth": Warn(_UNSLOTH),
    "use_unsloth_gc": Warn("checkpoints in host memory are counted on the GPU"),
    "packing": Warn("every sequence is taken to have the full length, which packing comes to"),
    "neat_packing": Warn("packed sequences are counted as one of the full length"),
    "shift_attn": Warn("shifted sparse attention is counted as whole attention"),
    "mixture_of_depths": Refuse("mixture of depths is another model"),
    "use_galore": Refuse(_SHRUNK),
    "use_apollo": Refuse(_SHRUNK),
    "use_badam": Refuse(_SHRUNK),
    "use_llama_pro": Refuse(_SHRUNK),
    "use_muon": Take("engine_optimizer", when("muon")),
    "sequence_parallel_size": Refuse("the sequence is not split like this", (1,)),
    "image_max_pixels": Warn("only the language model is counted, no vision tower"),
    "video_max_pixels": Warn("only the language model is counted, no vision tower"),
    "freeze_vision_tower": Warn("only the language model is counted, no vision tower"),
}

LLAMA_FACTORY = Format(
    name="LLaMA-Factory",
    marks=names("""
        finetuning_type cutoff_len template stage lora_rank lora_target overwrite_cache
        preprocessing_num_workers flash_attn quantization_bit dataset_dir max_samples
        plot_loss enable_liger_kernel disable_gradient_checkpointing pure_bf16
        """),
    rules=_RULES,
    harmless=TRAINER_HARMLESS
    | names("""
        dataset dataset_dir template cutoff_len_eval max_samples overwrite_cache
        preprocessing_num_workers preprocessing_batch_size plot_loss val_size
        compute_accuracy train_on_prompt mask_history streaming mix_strategy
        interleave_probs ignore_pad_token_for_loss eval_dataset adapter_name_or_path
        adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens
        new_special_tokens model_revision low_cpu_mem_usage rope_scaling loraplus_lr_ratio
        loraplus_lr_embedding create_new_adapter hf_hub_token ms_hub_token
        print_param_status enable_thinking use_reentrant_gc tokenized_path buffer_size
        ray_run_name ray_num_workers ray_storage_path resources_per_worker
        placement_strategy include_effective_tokens_per_second use_swanlab packed_length
        freeze_trainable_modules ddp_timeout freeze_multi_modal_projector
        """),
    harmless_starts=(*TRAINER_HARMLESS_STARTS, "swanlab_", "galore_", "apollo_", "badam_"),
    defaults={
        **{key: value for key, value in TRAINER_DEFAULTS.items() if key != "weights"},
        "adapter": "lora",
        "checkpointing": "full",
        "seq_len": 2048,
        "finetune.r": 8,
        "finetune.dropout": 0.0,
        "finetune.targets": ["all-linear"],
        "finetune.double_quant": True,
        "finetune.upcast": "none",
    },
)
