"""Benchmark files of other projects, as lines of a published table (`src.config.published`).

fms-acceleration (`scripts/benchmarks/refs/GPU*.csv`): one line per run. What its benchmark does for
every run is not in the file, but in `scenarios*.yaml` and `defaults.yaml` beside it: packed samples
of 4096 tokens, checkpointing, FlashAttention 2, AdamW, FSDP1 on several GPUs. Library versions are
read from `requirements*.txt` of the same folder.

PEFT (`method_comparison/MetaMathQA/results/*.json`): one run per file. `run.py` pads each batch to
its longest sample and writes `max_memory_reserved()` of the whole run, in which it also generates
answers for evaluation, `batch_size_eval` at a time. The averages beside it are of
`memory_reserved()` after each step, and no peaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import UserError

Line = dict[str, str]
"""A line of a published table: column -> word."""

FMS_URL = (
    "https://github.com/foundation-model-stack/fms-acceleration/blob/main/scripts/benchmarks/refs"
)
PEFT_URL = "https://github.com/huggingface/peft/blob/main/method_comparison/MetaMathQA/results"

_PEAK = ("mem_peak_torch_mem_alloc_in_bytes", "peak_torch_mem_alloc_in_bytes")
_SMI = ("mem_nvidia_mem_reserved", "nvidia_mem_reserved")
FMS_COLUMNS = ("framework_config", "model_name_or_path", "num_gpus", "peft_method")
_FMS_FILE = re.compile(r"(?P<gpu>[a-z]+\d+)_(?P<gib>\d+)gb(?P<what>_\w+)?")
_PACKED_TOKENS = 4096
_SHORTER = {"bigcode/gpt_bigcode-santacoder": 2048}
"""Models whose positions end before that."""

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "flash-attn", "trl")
_PREPARED = "prepare_model_for_kbit_training upcasts non-quantised params to fp32"
_NOT_PREPARED = "no kbit fp32 upcast of norms/embeddings"
_FRAMEWORKS = {"none": "", "baseline-peft-bnb": _PREPARED, "accelerated-peft-bnb": _NOT_PREPARED}
_ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

_WITHOUT_BYTES = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    ]
)
"""Keys of a LoRA that are read, or change no bytes whatever they say."""

_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Values of other keys with which a LoRA is a plain one; what is not here has to be left empty."""

HAND_WRITTEN = "hand-written loop"
"""The remark on a run whose loop is not the Trainer's: it keeps a step's outputs until the next."""

PADDED = "batches are padded to their longest sample"
"""How the remark on a run begins whose sequences are not all as long as the row says."""


def is_fms(columns: Sequence[str]) -> bool:
    """Whether a table's columns are those of fms-acceleration's benchmark."""
    return all(name in columns for name in FMS_COLUMNS) and any(name in columns for name in _PEAK)


def is_peft(content: object) -> bool:
    """Whether a JSON file's content is a result of PEFT's benchmark."""
    parts = ("run_info", "train_info", "meta_info")
    return isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in parts)


def fms_lines(path: Path, lines: Sequence[Mapping[str, str]]) -> Iterator[Line | UserError]:
    """The lines of fms-acceleration's file; a refusal for each that is no run of ours.

    Raises:
        UserError: the file's name says no GPU, or no versions lie beside it.
    """
    named = _FMS_FILE.fullmatch(path.stem)
    if named is None:
        raise _refusal("import", path.name, "named GPU_SIZEgb*.csv, as in the benchmark's refs")
    framework = _versions_beside(path, named["what"] or "")
    gpu = f"{named['gpu'].upper()}-{named['gib']}GB"
    for number, line in enumerate(lines, start=2):
        try:
            yield _fms_line(line, gpu, framework) | {
                "id": f"{path.stem}-{number}",
                "source_url": f"{FMS_URL}/{path.name}#L{number}",
            }
        except UserError as error:
            yield UserError(
                key=f"line {number}: {error.key}", value=error.value, allowed=error.allowed
            )


def _versions_beside(path: Path, what: str) -> str:
    for name in (f"requirements{what}.txt", "requirements.txt"):
        file = path.with_name(name)
        if file.is_file():
            pins = re.findall(r"^([\w-]+)==([\w.+]+)$", file.read_text("utf-8"), re.MULTILINE)
            found = dict(pins)
            return "; ".join(f"{name} {found[name]}" for name in _LIBRARIES if name in found)
    allowed = "needs the benchmark's requirements.txt beside it: versions decide on bytes"
    raise _refusal("import", path.name, allowed)


def _fms_line(line: Mapping[str, str], gpu: str, framework: str) -> Line:
    config = line["framework_config"]
    if config not in _FRAMEWORKS:
        raise _refusal("framework_config", config, "other kernels than transformers'")
    if line.get("torch_dtype") != "bfloat16" or line.get("fp16"):
        raise _refusal(
            "torch_dtype", line.get("torch_dtype") or "''", "bfloat16 alone, without fp16"
        )
    peak = next((line[name] for name in _PEAK if line.get(name)), "")
    if not peak:
        raise _refusal(_PEAK[0], "''", "no peak: the table does not say how the run failed")
    smi = next((line[name] for name in _SMI if line.get(name)), "")
    count = line["num_gpus"]
    return {
        "date_or_version": "2024",
        "gpu_model": gpu,
        "gpu_count": count,
        "framework": framework,
        "model_id": line["model_name_or_path"],
        "method": "single" if count == "1" else "fsdp1-full-shard",
        "finetune": _fms_finetune(line, quantised=config != "none"),
        "precision": "bf16 weights + bf16 autocast"
        if line.get("bf16")
        else "pure-bf16 (bf16 weights, no autocast flag)",
        "optimizer": "adamw_torch (foreach)",
        "micro_batch_per_gpu": line["per_device_train_batch_size"],
        "seq_len": str(_SHORTER.get(line["model_name_or_path"], _PACKED_TOKENS)),
        "grad_checkpointing": "full",
        "attention": "flash_attention_2",
        "compile": "no",
        "cpu_offload": "no",
        "other": "; ".join(words for words in (_FRAMEWORKS[config], "packed sequences") if words),
        "measured_metric": "max_memory_allocated",
        "unit": "bytes",
        "measured_value": peak,
        "outcome": "fits",
        "confidence": "high",
        "notes": f"nvidia-smi memory.used peak (mean over GPUs) {smi} MiB" if smi else "",
    }


def _fms_finetune(line: Mapping[str, str], *, quantised: bool) -> str:
    if not line["peft_method"]:
        return "full"
    targets = line["target_modules"].split()
    # c_attn is named for models of another family and is not there in the others.
    targets = [name for name in targets if name != "c_attn"]
    if line["peft_method"] != "lora" or tuple(targets) != _ATTENTION_PROJECTIONS:
        raise _refusal("target_modules", line["target_modules"], " ".join(_ATTENTION_PROJECTIONS))
    kind = "qlora nf4" if quantised else "lora"
    words = f"{kind} r{line['r']} alpha{line['lora_alpha']} dropout{line['lora_dropout']} q,k,v,o"
    return words + (" (no double quant stated)" if quantised else "")


def peft_line(path: Path, content: Mapping[str, Any]) -> Line:
    """The line of a result of PEFT's benchmark.

    Raises:
        UserError: it is no run of ours.
    """
    run, trained, meta = (content[key] for key in ("run_info", "train_info", "meta_info"))
    config = run["train_config"]
    _expect(trained, "status", ("success",))
    _expect(config, "dtype", ("bfloat16",))
    _expect(config, "optimizer_type", ("AdamW",))
    for key in ("compile", "use_amp"):
        _expect(config, key, (False,))
    options = config.get("optimizer_kwargs") or {}
    _expect(options, "foreach", (None, True))
    for key in ("fused", "amsgrad"):
        _expect(options, key, (None, False))
    _expect(config, "use_gc", (None, False, True))
    _expect(config, "autocast_adapter_dtype", (True,))
    _expect(config, "attn_implementation", (None, "sdpa"))
    peak = trained.get("accelerator_memory_max", trained.get("cuda_memory_max"))
    packages = meta["package_info"]
    framework = (
        f"{name} {packages[f'{name}-version']}" for name in ("torch", "transformers", "peft")
    )
    longest = config["max_seq_length"]
    system = meta["system_info"]
    return {
        "id": path.stem,
        "source_url": f"{PEFT_URL}/{path.name}",
        "date_or_version": str(run["created_at"]),
        "gpu_model": str(system.get("accelerator") or system["gpu"]),
        "gpu_count": "1",
        "framework": "; ".join(framework),
        "model_id": str(config["model_id"]),
        "method": "single",
        "finetune": _peft_finetune(run["peft_config"]),
        "precision": "bf16 weights, adapters fp32 (autocast_adapter_dtype)",
        "optimizer": "torch AdamW",
        "micro_batch_per_gpu": str(config["batch_size"]),
        "seq_len": str(longest),
        "grad_checkpointing": "full" if config.get("use_gc") else "none",
        "attention": "sdpa (default)",
        "compile": "no",
        "cpu_offload": "no",
        "other": f"{PADDED}, {longest} tokens at most; {HAND_WRITTEN}",
        "measured_metric": "max_memory_reserved",
        "unit": "bytes",
        "measured_value": str(peak),
        "outcome": "fits",
        "confidence": "medium",
        "notes": f"{PADDED}: the longest batch is taken to be of {longest} tokens; the peak is the "
        "whole run's, generation for evaluation included",
    }


def _peft_finetune(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return "full"
    kind = config["peft_type"]
    if kind in ("PROMPT_TUNING", "PREFIX_TUNING"):
        if kind == "PREFIX_TUNING":
            _expect(config, "prefix_projection", (False,))
        return f"{kind.split('_')[0].lower()} {config['num_virtual_tokens']} tokens"
    if kind != "LORA":
        raise _refusal("peft_type", kind, "no kind of fine-tuning of ours")
    _check_plain(config)
    targets = config["target_modules"]
    names = ",".join(sorted(targets)) if isinstance(targets, list) else str(targets)
    kind = "dora" if config.get("use_dora") else "lora"
    return (
        f"{kind} r{config['r']} alpha{config['lora_alpha']} dropout{config['lora_dropout']} {names}"
    )


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse a LoRA with anything that a plain one does not have."""
    for key, value in config.items():
        if key in _PLAIN:
            _expect(config, key, _PLAIN[key])
        elif key not in _WITHOUT_BYTES and value not in (None, False, {}, []):
            raise _refusal(key, value, "no setting of ours")


def _expect(content: Mapping[str, Any], key: str, values: tuple[object, ...]) -> None:
    if content.get(key) not in values:
        allowed = f"only {' or '.join(str(value) for value in values)} is understood"
        raise _refusal(key, content.get(key), allowed)


def _refusal(key: str, value: object, allowed: str) -> UserError:
    return UserError(key=key, value=value, allowed=allowed)
