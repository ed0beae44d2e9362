"""Every key of `src.estimate`: what is allowed, what it means; the help text is made from this."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from src.config.program import Key, Program, ValueKind
from src.spec import (
    Attention,
    Checkpointing,
    EstimatorKind,
    FinetuneKind,
    Loss,
    Method,
    Offload,
    Optimizer,
    Policy,
    Precision,
    Quantization,
    Runtime,
    Unknown,
    Upcast,
)

FORMATS = ("table", "json", "csv")
LISTINGS = ("models", "gpus", "methods")
LAYOUTS = ("pareto", "all")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PAGE_SUFFIXES = (".html",)
SNAPSHOT_SUFFIXES = (".pickle", ".pkl")
FILES_KEY = "from"
"""No key of the configuration: its files become other keys when it is composed."""


def _choices(values: Iterable[str]) -> str:
    return " | ".join(values)


def _choice(kind: type[StrEnum], meaning: str) -> Key:
    return Key(allowed=_choices(kind), meaning=meaning, kind=ValueKind.TEXT)


_COUNT = "a whole number, 1 or more"
_COUNT_OR_NULL = "1 or more | null"
_ELEMENTS = "elements, 0 or more"
_SWITCH = "true | false"

KEYS: dict[str, Key] = {
    "model": Key(
        allowed="name or hub id of list=models, config.json or its folder, owner/name on the hub",
        meaning="",
        kind=ValueKind.TEXT,
    ),
    FILES_KEY: Key(
        allowed="FILE | [FILE,FILE]",
        meaning="keys from TrainingArguments, accelerate, DeepSpeed, TRL, axolotl, LLaMA-Factory",
        kind=ValueKind.FILES,
    ),
    "arch": Key(allowed="arch.<field>=value", meaning="overrides a field of the model's config"),
    "gpus": Key(allowed=_COUNT, meaning="GPUs of the job"),
    "gpu": Key(
        allowed="a name of list=gpus | auto",
        meaning="the GPU; auto: this machine's",
        kind=ValueKind.TEXT,
    ),
    "gpus_per_node": Key(allowed=_COUNT_OR_NULL, meaning="null: as usual for the GPU"),
    "internode_gbps": Key(allowed="GB/s, more than 0", meaning="network per GPU between nodes"),
    "method": Key(
        allowed=f"all | [{','.join(Method)}]",
        meaning="",
        kind=ValueKind.WORDS,
    ),
    "tp": Key(allowed=_COUNT_OR_NULL, meaning="tensor-parallel degree; null: all possible"),
    "finetune": _choice(FinetuneKind, "which parameters are trained"),
    "finetune.r": Key(allowed=_COUNT, meaning="LoRA's rank"),
    "finetune.alpha": Key(allowed=_COUNT, meaning="LoRA's scale; no memory"),
    "finetune.dropout": Key(allowed="0 or more and below 1", meaning="LoRA's dropout"),
    "finetune.targets": Key(
        allowed="[names of Linears] | [all-linear]",
        meaning="where adapters go; []: attention",
        kind=ValueKind.WORDS,
    ),
    "finetune.dora": Key(allowed=_SWITCH, meaning="DoRA: magnitudes are trained too"),
    "finetune.quantization": _choice(Quantization, "how bitsandbytes stores the frozen Linears"),
    "finetune.double_quant": Key(allowed=_SWITCH, meaning="NF4's scales are quantised too"),
    "finetune.upcast": _choice(Upcast, "turned to fp32; all: prepare_model_for_kbit_training"),
    "finetune.trained_blocks": Key(allowed=_COUNT, meaning="the last blocks that freeze trains"),
    "finetune.num_virtual_tokens": Key(allowed=_COUNT, meaning="length of the prefix or prompt"),
    "precision": _choice(Precision, "mixed: fp32 weights, computed in 16 bits; true: all in 16"),
    "optimizer": _choice(Optimizer, "adamw and sgd: foreach"),
    "seq_len": Key(allowed=f"{_COUNT} | FILE", meaning="tokens; FILE: lengths, one per line"),
    "micro_batch": Key(
        allowed=_COUNT_OR_NULL, meaning="sequences per GPU; null: the largest that fits"
    ),
    "grad_accum": Key(allowed=_COUNT, meaning="micro steps per optimizer step"),
    "checkpointing": _choice(Checkpointing, "which activations are recomputed"),
    "checkpoint_every": Key(allowed=_COUNT, meaning="one block of that many is recomputed"),
    "attention": _choice(Attention, "attn_implementation of transformers"),
    "loss": _choice(Loss, "how the loss is computed"),
    "offload": _choice(Offload, "what waits in host memory; all: parameters too"),
    "activation_offload": Key(allowed=_SWITCH, meaning="kept activations wait in host memory"),
    "sequence_parallel": Key(allowed=_SWITCH, meaning="with tensor parallelism"),
    "vocab_parallel": Key(allowed=_SWITCH, meaning="embedding and head are split too; dryrun"),
    "fp32_reduce": Key(allowed=_SWITCH, meaning="FSDP, DeepSpeed: gradients reduced in fp32"),
    "estimator": _choice(
        EstimatorKind, "who answers; auto: calibrated, and dryrun where formula cannot"
    ),
    "champion": Key(
        allowed="FOLDER | null",
        meaning="of src.train's correction; null: models/residual",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "runtime": Key(
        allowed=f"{_choices(Runtime)} | null",
        meaning="null: the estimator's; gemini: LLMem's",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "solve": Key(
        allowed=f"{_choices(Unknown)} | null",
        meaning="left open: the largest that fits, the fewest GPUs, every GPU that does",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "layouts": Key(
        allowed=f"{_choices(LAYOUTS)} | null",
        meaning="of every degree and micro batch: those that nothing beats in memory and speed, or "
        "all, as csv or json",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "measured": Key(
        allowed="FILE.json|FILE.jsonl, with :N or :ID for one of several | null",
        meaning="explains the gap to a row or a memory snapshot",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "policy": _choice(Policy, "what is recommended; llmem: by LLMem's own rule"),
    "dryrun.time_limit_s": Key(allowed="seconds, 1 or more", meaning="for each dry run"),
    "zero.reduce_bucket_size": Key(allowed="elements, 1 or more", meaning="DeepSpeed"),
    "zero.prefetch_bucket_size": Key(allowed=_ELEMENTS, meaning="stage 3"),
    "zero.param_persistence_threshold": Key(allowed=_ELEMENTS, meaning="stage 3"),
    "zero.max_live_parameters": Key(allowed=_ELEMENTS, meaning="stage 3"),
    "zero.fp32_gradients": Key(allowed=_SWITCH, meaning="gradients accumulate in fp32"),
    "trust_remote_code": Key(allowed=_SWITCH, meaning="run code of a hub model's owner"),
    "format": Key(
        allowed=_choices(FORMATS), meaning="what is printed on stdout", kind=ValueKind.TEXT
    ),
    "plot": Key(
        allowed=f"FILE{_choices(PLOT_SUFFIXES).replace(' | ', '|')} | null",
        meaning="draws the ledgers; one dry run: over time",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "snapshot": Key(
        allowed=f"FILE{_choices(SNAPSHOT_SUFFIXES).replace(' | ', '|')} | null",
        meaning="dry run of one method, for pytorch.org/memory_viz",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "report": Key(
        allowed="FILE.html | null",
        meaning="writes the answer as a page that needs no network",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
    "list": Key(
        allowed=_choices(LISTINGS),
        meaning="prints what there is, and nothing else",
        kind=ValueKind.OPTIONAL_TEXT,
    ),
}

_OTHER_NAMES = {
    "model_name": "model",
    "model_name_or_path": "model",
    "num_gpus": "gpus",
    "n_gpus": "gpus",
    "world_size": "gpus",
    "gpu_type": "gpu",
    "batch_size": "micro_batch",
    "bs": "micro_batch",
    "per_device_train_batch_size": "micro_batch",
    "sequence_length": "seq_len",
    "max_seq_len": "seq_len",
    "max_length": "seq_len",
    "gradient_accumulation_steps": "grad_accum",
    "gradient_checkpointing": "checkpointing",
    "attn_implementation": "attention",
    "dtype": "precision",
    "optim": "optimizer",
    "r": "finetune.r",
    "lora_r": "finetune.r",
    "target_modules": "finetune.targets",
    "lora": "finetune",
    "strategy": "method",
    "output": "format",
    "config_file": FILES_KEY,
    "timeout": "dryrun.time_limit_s",
    "memory_snapshot": "snapshot",
    "row": "measured",
}

ESTIMATE = Program(
    name="estimate",
    question="How much GPU memory does a fine-tuning job need, and which method runs it fastest?",
    keys=KEYS,
    other_names=_OTHER_NAMES,
    group="finetune",
    options=tuple(FinetuneKind),
    default_option=FinetuneKind.FULL,
    instead_of_sweeps="compare methods with method=[fsdp,zero3]",
    free=("arch",),
    examples=(
        "model=opt-1.3b gpus=4",
        "model=llama-3-8b gpus=8 gpu=h100-80gb finetune=lora",
        "model=./config.json method=[fsdp,zero3] gpus=4 format=json",
    ),
    ending="stdout holds the answer alone. Exit 0: something fits, 3: nothing does, 1: bad input.",
)
