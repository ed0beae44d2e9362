"""Which settings can run together at all; what an estimator covers of it is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from src.errors import UserError
from src.spec.choices import (
    Checkpointing,
    FinetuneKind,
    Loss,
    Method,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    Upcast,
)
from src.spec.job import Job, Layout

_BITSANDBYTES = (
    Optimizer.ADAMW_8BIT,
    Optimizer.PAGED_ADAMW,
    Optimizer.PAGED_ADAMW_8BIT,
    Optimizer.LION,
)
WHOLE_TENSOR_OPTIMIZERS = (*_BITSANDBYTES, Optimizer.ADAFACTOR, Optimizer.MUON)
"""They look at a weight as a whole, or at its blocks: not at a shard of it."""


def _is_int8(job: Job) -> bool:
    return job.finetune.is_quantized and job.finetune.quantization is Quantization.INT8


def _saves_split_tensors(job: Job) -> bool:
    """Whether autograd saves tensors of a split block outside a checkpoint."""
    recomputed = job.checkpointing is Checkpointing.FULL and job.checkpoint_every == 1
    return job.sequence_parallel or not recomputed


_Rule = tuple[Callable[[Job, Method], bool], str, Callable[[Job, Method], object], str]

_RULES: tuple[_Rule, ...] = (
    (
        lambda job, method: method.is_zero and job.precision is Precision.BF16_TRUE,
        "method",
        lambda _, method: method,
        "DeepSpeed keeps an fp32 master copy; precision=bf16-mixed, fp16-mixed or fp32",
    ),
    (
        lambda job, method: job.offload is Offload.OPTIMIZER and not method.is_zero,
        "offload",
        lambda job, _: job.offload,
        "only DeepSpeed takes optimizer states alone to host memory; method=zero1, zero2 or zero3",
    ),
    (
        lambda job, method: (
            job.offload is Offload.ALL and not (method.is_fsdp or method is Method.ZERO3)
        ),
        "offload",
        lambda job, _: job.offload,
        "parameters are taken to host memory where they are sharded; method=fsdp, hsdp or zero3",
    ),
    (
        lambda job, method: (
            job.optimizer in WHOLE_TENSOR_OPTIMIZERS
            and (method.is_fsdp or method.is_zero or method.has_tensor_parallel)
        ),
        "optimizer",
        lambda job, _: job.optimizer,
        "works on whole weights; method=single or ddp",
    ),
    (
        lambda job, _: (
            job.finetune.kind is FinetuneKind.PREFIX and job.checkpointing is not Checkpointing.NONE
        ),
        "checkpointing",
        lambda job, _: job.checkpointing,
        "PEFT refuses prefix tuning with checkpointing; none",
    ),
    (
        lambda job, method: (
            (job.finetune.dora or job.finetune.kind is FinetuneKind.PREFIX)
            and method.has_tensor_parallel
        ),
        "method",
        lambda _, method: method,
        "PEFT's DoRA and prefix tuning work on whole weights and heads; no tensor parallelism",
    ),
    (
        lambda job, method: job.finetune.is_quantized and method.has_tensor_parallel,
        "method",
        lambda _, method: method,
        "bitsandbytes' quantised Linears are not split by tensor parallelism",
    ),
    (
        lambda job, method: _is_int8(job) and (method.is_fsdp or method is Method.ZERO3),
        "finetune.quantization",
        lambda job, _: job.finetune.quantization,
        "only floating-point storage is sharded: nf4; or method=single, ddp, zero1 or zero2",
    ),
    (
        lambda job, _: (
            job.finetune.is_quantized
            and job.finetune.upcast is Upcast.NORMS
            and job.precision is Precision.BF16_TRUE
        ),
        "finetune.upcast",
        lambda job, _: job.finetune.upcast,
        "norms in fp32 beside a head in bf16 need autocast; precision=bf16-mixed, or all or none",
    ),
    (
        lambda job, method: (
            job.vocab_parallel
            and method.has_tensor_parallel
            and (job.sequence_parallel or job.loss not in (Loss.STANDARD, Loss.STANDARD_4X))
        ),
        "vocab_parallel",
        lambda _job, _method: "true",
        "a split head gives every GPU all logits of the whole sequence; false, or loss=standard "
        "and sequence_parallel=false",
    ),
    (
        lambda job, method: (
            job.activation_offload and method.has_tensor_parallel and _saves_split_tensors(job)
        ),
        "activation_offload",
        lambda _job, _method: "true",
        "save_on_cpu copies no distributed tensors; with tensor parallelism every block has to be "
        "recomputed, and the sequence whole",
    ),
)
"""(broken when, key, value, what is allowed)."""


def refusal(job: Job, method: Method, *, autocasts: bool = False) -> UserError | None:
    """Why a job cannot run by a method; None where it can.

    Args:
        job: the job.
        method: the method.
        autocasts: whether the loop is under autocast although the precision says none.
    """
    if autocasts:
        job = replace(job, precision=Precision.BF16_MIXED)
    for is_broken, key, value, allowed in _RULES:
        if is_broken(job, method):
            return UserError(key=key, value=value(job, method), allowed=allowed)
    return None


def uneven_sequence(job: Job, layout: Layout) -> UserError | None:
    """Why the sequence cannot be split as sequence parallelism does; None where it can."""
    if not job.sequence_parallel or job.model_seq_len % layout.tp == 0:
        return None
    allowed = f"a multiple of the tensor-parallel degree {layout.tp} with sequence_parallel=true"
    return UserError(key="seq_len", value=job.seq_len, allowed=allowed)
