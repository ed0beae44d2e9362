"""The words of published tables, and what they mean in ours."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from src.config.benchmarks import HAND_WRITTEN, PADDED
from src.errors import UserError
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Loss,
    Method,
    Optimizer,
    Precision,
    Upcast,
)
from src.units import GIB, KIB, MIB

NO = "no"

MODELS = {"bert-base(HF BertConfig default)": "bert-base-uncased"}
"""Models that are named by their shape."""

REMARKS = (
    "packed sequences",
    "baseline HF bnb",
    "no kbit fp32 upcast of norms/embeddings",
    "prepare_model_for_kbit_training upcasts non-quantised params to fp32",
    "grad kept between steps",
    "vocab 30522",
    "trainable params",
    PADDED,
    HAND_WRITTEN,
)
"""Remarks that change no byte, or that other functions here read."""

KBIT_REMARK = "prepare_model_for_kbit_training"

_AUTOCAST_OVER_HALF = {"autocast_half_weights": True}

PRECISIONS: dict[str, tuple[Precision, dict[str, Any]]] = {
    "pure-bf16 (bf16 weights, no autocast flag)": (Precision.BF16_TRUE, {}),
    "bf16 weights, adapters fp32 (autocast_adapter_dtype)": (Precision.BF16_TRUE, {}),
    "bf16 weights + bf16 autocast": (Precision.BF16_TRUE, _AUTOCAST_OVER_HALF),
    "fp32 (tf32 matmul)": (Precision.FP32, {}),
    "fp32 (tf32)": (Precision.FP32, {}),
    "amp-fp16": (Precision.FP16_MIXED, {}),
}
"""Precision, and what the loop does besides."""

OPTIMIZERS = {
    "adamw_torch (foreach)": Optimizer.ADAMW,
    "torch Adam (foreach)": Optimizer.ADAMW,
    "torch AdamW": Optimizer.ADAMW,
}

CHECKPOINTINGS = {"full": Checkpointing.FULL, "none": Checkpointing.NONE}

ATTENTIONS: dict[str, tuple[Attention, str]] = {
    "flash_attention_2": (Attention.FLASH, ""),
    "sdpa (default)": (Attention.SDPA, ""),
    "sdpa/eager unknown": (
        Attention.SDPA,
        "attention is not stated; sdpa, transformers' default, is taken",
    ),
}
"""Attention, and what was assumed."""

_OURS = ("transformers", "milabench HF")
_LAST_4X_LOSS = (4, 49)
"""From here on transformers shifts the labels instead of the logits."""

_UNITS = {
    "bytes": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "MB(2^20)": MIB,
    "GB(2^30)": GIB,
    "GB(1e9)": 10**9,
}

_LEVELS = {
    "max_memory_allocated": "allocated",
    "max_memory_reserved": "reserved",
    "nvidia-smi (NVML peak used)": "device",
}

_METHODS = (
    (re.compile(r"single"), Method.SINGLE),
    (re.compile(r"ddp"), Method.DDP),
    (re.compile(r"zero1"), Method.ZERO1),
    (re.compile(r"zero2"), Method.ZERO2),
    (re.compile(r"zero3"), Method.ZERO3),
    (re.compile(r"fsdp2( \(\d+\))?"), Method.FSDP),
    (re.compile(r"fsdp1-full-shard.*"), Method.FSDP),
)

_ADAPTERS = re.compile(
    r"(?P<kind>lora|dora|qlora nf4) r(?P<r>\d+)( alpha(?P<alpha>\d+))?"
    r"( dropout(?P<dropout>[\d.]+))? (?P<targets>[a-z,_]+(\(attn\))?)( \(no double quant stated\))?"
)
_VIRTUAL = re.compile(r"(?P<kind>prompt|prefix) (?P<count>\d+) tokens")
_NAMED = re.compile(r"\w+_proj(,\w+_proj)*")
_TARGETS = {
    "q,k,v,o": (),
    "c_attn,c_proj(attn)": (),
    "q,v": ("q_proj", "v_proj"),
}
"""Linears as tables name them; (): the attention projections."""


def level_of(metric: str) -> str | None:
    """The level that a metric speaks of; None where it does not say."""
    return _LEVELS.get(metric)


def to_bytes(value: str, unit: str) -> int:
    """Whole bytes.

    Raises:
        UserError: no number above 0, or a unit that has two meanings or none.
    """
    if unit not in _UNITS:
        raise UserError(key="unit", value=unit or "''", allowed=f"one of {', '.join(_UNITS)}")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number <= 0:
        raise UserError(key="measured_value", value=value or "''", allowed="a number above 0")
    return round(number * _UNITS[unit])


def versions_of(framework: str) -> dict[str, str]:
    """Library -> version, of the libraries that are given with one.

    Raises:
        UserError: other model code than transformers' ran.
    """
    if not any(words in framework for words in _OURS):
        raise UserError(
            key="framework", value=framework, allowed="other model code than transformers'"
        )
    pairs = (part.split(" ") for part in framework.split("; "))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1][:1].isdecimal()}


def loss_of(transformers: str | None) -> Loss:
    """The loss of a version of transformers; today's where none is given."""
    if transformers is None:
        return Loss.STANDARD
    major, minor = (int(part) for part in transformers.split(".")[:2])
    return Loss.STANDARD_4X if (major, minor) < _LAST_4X_LOSS else Loss.STANDARD


def read_method(words: str) -> tuple[Method, dict[str, Any]]:
    """The method, and the loop where it is FSDP1's.

    Raises:
        UserError: it is none of ours.
    """
    for pattern, method in _METHODS:
        if pattern.fullmatch(words):
            return method, {"fsdp1": True} if words.startswith("fsdp1") else {}
    raise UserError(key="method", value=words, allowed="no method of ours")


def read_finetune(words: str, remarks: str) -> Finetune:
    """Which parameters are trained; the remarks say what a quantised model is prepared by.

    Raises:
        UserError: no kind of ours, or Linears that are not known by that name.
    """
    if words in ("full", "full (MLM)"):
        return Finetune()
    virtual = _VIRTUAL.fullmatch(words)
    if virtual is not None:
        kind = FinetuneKind(virtual["kind"])
        return Finetune(kind=kind, num_virtual_tokens=int(virtual["count"]))
    found = _ADAPTERS.fullmatch(words)
    if found is None or not (found["targets"] in _TARGETS or _NAMED.fullmatch(found["targets"])):
        raise UserError(key="finetune", value=words, allowed="no kind of fine-tuning of ours")
    is_quantized = found["kind"].startswith("qlora")
    return Finetune(
        kind=FinetuneKind.QLORA if is_quantized else FinetuneKind.LORA,
        r=int(found["r"]),
        alpha=int(found["alpha"] or 32),
        dropout=float(found["dropout"] or 0),
        targets=_TARGETS.get(found["targets"], tuple(found["targets"].split(","))),
        dora=found["kind"] == "dora",
        upcast=Upcast.NORMS if KBIT_REMARK in remarks else Upcast.NONE,
    )
