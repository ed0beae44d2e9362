"""A case as JSON: one step of a job, and how its loop is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from src.errors import UserError, unknown_name
from src.measure.options import LoopOptions
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Gpu,
    Interconnect,
    Job,
    Layout,
    Loss,
    Method,
    Model,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    Step,
    Upcast,
    ZeroBuffers,
    parse_choice,
)

A100_80GB = Gpu(
    sku="a100-80gb",
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    usable_gib=79.25,
    context_mib=None,
    memory_bandwidth_gbps=2039.0,
    bf16_tflops=312.0,
    fp16_tflops=312.0,
    tf32_tflops=156.0,
    fp32_tflops=19.5,
    interconnect=Interconnect.NVLINK,
    link_gbps=300.0,
    gpus_per_node=8,
    sm_count=108,
)
"""The GPU of a case that names none."""

_CHOICES = {
    "precision": Precision,
    "optimizer": Optimizer,
    "checkpointing": Checkpointing,
    "attention": Attention,
    "loss": Loss,
    "offload": Offload,
}
_SWITCHES = ("activation_offload", "sequence_parallel", "vocab_parallel", "fp32_reduce")
_FINETUNE_CHOICES = {"kind": FinetuneKind, "quantization": Quantization, "upcast": Upcast}
DEVICES = ("simulated", "cuda")

_KEYS = (
    "device",
    "model",
    "finetune",
    "seq_len",
    "grad_accum",
    "micro_batch",
    "method",
    "layout",
    "gpu",
    "loop",
    "checkpoint_every",
    "zero",
    *_CHOICES,
    *_SWITCHES,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one dry run or measurement takes.

    Attributes:
        step: the step.
        loop: how the training loop around it works.
        device: `simulated`, or `cuda` for a measurement.
    """

    step: Step
    loop: LoopOptions = field(default_factory=LoopOptions)
    device: str = DEVICES[0]


def _mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        raise UserError(key=key, value=value, allowed="an object of named values")
    return dict(value)


def _build(kind: type[Any], values: Mapping[str, Any], *, key: str) -> Any:
    """An instance of the dataclass `kind`; an unknown or missing field is a UserError."""
    known = [f.name for f in fields(kind) if f.init]
    for name in values:
        if name not in known:
            raise unknown_name(
                key=f"{key}.{name}", value=name, known=known, what=f"fields of {key}"
            )
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(key=key, value=dict(values), allowed=str(error)) from error


def _gpu(raw: Mapping[str, Any]) -> Gpu:
    values = {f.name: getattr(A100_80GB, f.name) for f in fields(Gpu)} | _mapping(raw, "gpu")
    values["compute_capability"] = tuple(values["compute_capability"])
    values["interconnect"] = parse_choice(
        Interconnect, str(values["interconnect"]), key="gpu.interconnect"
    )
    gpu: Gpu = _build(Gpu, values, key="gpu")
    return gpu


def _finetune(raw: Mapping[str, Any]) -> Finetune:
    values = _mapping(raw, "finetune")
    for name in _FINETUNE_CHOICES.keys() & values.keys():
        kind: type[Any] = _FINETUNE_CHOICES[name]
        values[name] = parse_choice(kind, str(values[name]), key=f"finetune.{name}")
    if "targets" in values:
        values["targets"] = tuple(values["targets"])
    finetune: Finetune = _build(Finetune, values, key="finetune")
    return finetune


def _whole(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(key=key, value=value, allowed="a whole number, 1 or more")
    return value


def _switches(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: raw[key] for key in _SWITCHES if key in raw}
    for key, value in found.items():
        if not isinstance(value, bool):
            raise UserError(key=key, value=value, allowed="true or false")
    return found


def parse_case(raw: object) -> Case:
    """The case that a JSON object describes; `src.measure.worker` documents the format.

    Raises:
        UserError: an unknown key, a wrong value, or no model.
    """
    if not isinstance(raw, Mapping):
        raise UserError(key="case", value=raw, allowed="a JSON object")
    for key in raw:
        if key not in _KEYS:
            raise unknown_name(key="case", value=str(key), known=_KEYS, what="keys of a case")
    model = _mapping(raw, "model")
    model.setdefault("name", "model")
    model.setdefault("hf_id", None)
    choices: dict[str, Any] = {
        key: parse_choice(kind, str(raw[key]), key=key)
        for key, kind in _CHOICES.items()
        if key in raw
    }
    job = Job(
        model=_build(Model, model, key="model"),
        finetune=_finetune(raw),
        seq_len=_whole(raw, "seq_len", 512),
        grad_accum=_whole(raw, "grad_accum", 1),
        checkpoint_every=_whole(raw, "checkpoint_every", 1),
        zero=_build(ZeroBuffers, _mapping(raw, "zero"), key="zero"),
        **choices,
        **_switches(raw),
    )
    step = Step(
        job=job,
        method=parse_choice(Method, str(raw.get("method", "single")), key="method"),
        layout=_build(Layout, _mapping(raw, "layout"), key="layout"),
        gpu=_gpu(raw),
        micro_batch=_whole(raw, "micro_batch", 1),
    )
    device = str(raw.get("device", DEVICES[0]))
    if device not in DEVICES:
        raise unknown_name(key="device", value=device, known=DEVICES, what="devices")
    loop = _build(LoopOptions, _mapping(raw, "loop"), key="loop")
    return Case(step=step, loop=loop, device=device)
