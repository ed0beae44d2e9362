"""What a dry run takes for granted that a real run may do otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.measure.case import Case
from src.measure.kernels import DISTINCT_TOKEN_FRACTION, SORTED_EMBEDDING_INDICES
from src.memory.outside import context_bytes, nccl_bytes
from src.spec import Attention, Quantization
from src.units import MIB

EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config fields that hold the number of routed experts."""


def num_experts(config: Mapping[str, object]) -> int:
    """Routed experts of a block, from a config's fields; 0 without."""
    counts = [count for name in EXPERT_FIELDS if isinstance(count := config.get(name), int)]
    return counts[0] if counts else 0


def assumptions(case: Case) -> tuple[str, ...]:
    """One sentence for each assumption that bears on the case."""
    step, config = case.step, case.step.job.model.config
    notes: list[str] = []
    if num_experts(config):
        notes.append("every expert gets the same number of tokens")
    if isinstance(config.get("layerdrop"), float) and config["layerdrop"]:
        notes.append("no block is dropped (layerdrop 0)")
    if step.micro_batch * step.job.seq_len > SORTED_EMBEDDING_INDICES:
        notes.append(f"{DISTINCT_TOKEN_FRACTION:.0%} of a batch's tokens are distinct")
    if step.job.attention is Attention.SDPA and step.gpu.compute_capability >= (9, 0):
        notes.append("cuDNN's attention is taken to keep what the flash kernel keeps")
    if step.method.has_ddp and step.layout.dp > 1:
        notes.append("DistributedDataParallel's buckets are counted, its reducer is not run")
    if step.gpu.context_bytes is None:
        notes.append(f"CUDA context of {context_bytes(step.gpu) // MIB} MiB assumed")
    if step.layout.num_gpus > 1:
        notes.append(f"NCCL's {nccl_bytes(step.layout) // MIB:,} MiB assumed")
    if step.job.finetune.is_quantized:
        notes.append("bitsandbytes' Linears are stand-ins with their storage and temporaries")
        if step.job.finetune.quantization is Quantization.INT8:
            notes.append("no input of an int8 Linear is beyond its threshold for outliers")
    return tuple(notes)


def eager_instead(case: Case, model: Any) -> tuple[str, ...]:
    """Says that transformers took eager attention where SDPA was asked for."""
    job = case.step.job
    if job.attention is not Attention.SDPA or model.config._attn_implementation != "eager":
        return ()
    return (f"transformers has no sdpa attention for {job.model.model_type}: it runs eager",)
