"""Settings that could be other than asked: each a change of one setting, with the keys it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Job,
    Loss,
    Offload,
    Optimizer,
    Precision,
    Request,
)

MOST_TIMES = 8
"""So many times the GPUs asked for are told at most, or one node of them."""

SHORTEST = 128
"""The sequence length where halving stops."""


class Change(NamedTuple):
    """One setting changed.

    Attributes:
        words: the keys to type, `key=value`, separated by spaces.
        kind: the setting; of one kind only the smallest change that helps is told.
        request: the request with it.
    """

    words: str
    kind: str
    request: Request


def leaner(request: Request) -> Iterator[Change]:
    """Changes that can save memory; of each kind, the smallest first."""
    yield from _smaller_batches(request)
    yield from _fewer_activations(request)
    yield from _leaner_optimizers(request)
    yield from _freer(request)
    yield from _offloaded(request)
    yield from _adapters(request)
    job = request.job
    has_bf16 = request.cluster.gpu.bf16_tflops is not None
    if has_bf16 and job.precision is not Precision.BF16_TRUE:
        yield _of_job(request, "precision", precision=Precision.BF16_TRUE)
    yield from _more_gpus(request)
    yield from _shorter(request)


def _fewer_activations(request: Request) -> Iterator[Change]:
    job = request.job
    if job.checkpointing is not Checkpointing.FULL or job.checkpoint_every > 1:
        every = " checkpoint_every=1" if job.checkpoint_every > 1 else ""
        full = replace(job, checkpointing=Checkpointing.FULL, checkpoint_every=1)
        yield Change(f"checkpointing=full{every}", "checkpointing", replace(request, job=full))
    for loss in (Loss.CHUNKED, Loss.LIGER):
        if job.loss not in (loss, Loss.LIGER):
            yield _of_job(request, "loss", loss=loss)
    if job.attention is Attention.EAGER:
        yield _of_job(request, "attention", attention=Attention.SDPA)


def _freer(request: Request) -> Iterator[Change]:
    """Methods and degrees that were not asked for."""
    if request.methods:
        yield Change("method=all", "method", replace(request, methods=()))
    if request.tp is not None:
        yield Change("tp=null", "tp", replace(request, tp=None))


def _offloaded(request: Request) -> Iterator[Change]:
    job = request.job
    if job.offload is Offload.NONE:
        yield _of_job(request, "offload", offload=Offload.OPTIMIZER)
    if job.offload is not Offload.ALL:
        yield _of_job(request, "offload", offload=Offload.ALL)
    if not job.activation_offload:
        yield _of_job(request, "activation_offload", activation_offload=True)


def faster(request: Request) -> Iterator[Change]:
    """Changes that can save time where memory is left."""
    job = request.job
    if job.offload is not Offload.NONE:
        yield _of_job(request, "offload", offload=Offload.NONE)
    if job.activation_offload:
        yield _of_job(request, "activation_offload", activation_offload=False)
    if job.checkpointing is not Checkpointing.NONE:
        yield _of_job(request, "checkpointing", checkpointing=Checkpointing.NONE)
    if job.checkpointing is Checkpointing.FULL:
        yield _of_job(request, "checkpointing", checkpointing=Checkpointing.SELECTIVE)
        yield _of_job(request, "checkpointing", checkpoint_every=2 * job.checkpoint_every)
    if job.attention is Attention.EAGER:
        yield _of_job(request, "attention", attention=Attention.SDPA)
    if job.precision is Precision.FP32:
        half = Precision.BF16_MIXED if request.cluster.gpu.bf16_tflops else Precision.FP16_MIXED
        yield _of_job(request, "precision", precision=half)
    if job.loss is Loss.CHUNKED:
        yield _of_job(request, "loss", loss=Loss.STANDARD)
    if request.methods:
        yield Change("method=all", "method", replace(request, methods=()))


def _of_job(request: Request, kind: str, **fields: Any) -> Change:
    words = " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in fields.items()
    )
    return Change(words, kind, replace(request, job=replace(request.job, **fields)))


def _smaller_batches(request: Request) -> Iterator[Change]:
    """The micro batch's divisors, with as many more micro steps: the same batch in all."""
    asked, job = request.micro_batch or 1, request.job
    for parts in range(2, asked + 1):
        if asked % parts == 0:
            steps = job.grad_accum * parts
            smaller = replace(
                request, micro_batch=asked // parts, job=replace(job, grad_accum=steps)
            )
            words = f"micro_batch={asked // parts} grad_accum={steps}"
            yield Change(words, "micro_batch", smaller)


def _leaner_optimizers(request: Request) -> Iterator[Change]:
    job = request.job
    if job.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_LOOP):
        yield _of_job(request, "optimizer", optimizer=Optimizer.ADAMW_FUSED)
    if job.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_LOOP, Optimizer.ADAMW_FUSED):
        for optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.ADAFACTOR):
            yield _of_job(request, "optimizer", optimizer=optimizer)


def _adapters(request: Request) -> Iterator[Change]:
    """LoRA in place of full fine-tuning, QLoRA in place of either."""
    job = request.job
    if job.finetune.kind in (FinetuneKind.FULL, FinetuneKind.FREEZE):
        lora = Finetune(kind=FinetuneKind.LORA)
        yield Change("finetune=lora", "finetune", _finetuned(request, job, lora))
    if job.finetune.kind is not FinetuneKind.QLORA:
        kept = job.finetune if job.finetune.is_lora else Finetune()
        qlora = replace(kept, kind=FinetuneKind.QLORA)
        yield Change("finetune=qlora", "finetune", _finetuned(request, job, qlora))


def _finetuned(request: Request, job: Job, finetune: Finetune) -> Request:
    return replace(request, job=replace(job, finetune=finetune))


def _more_gpus(request: Request) -> Iterator[Change]:
    """The next sizes: one GPU more, then each doubling that fills whole nodes."""
    cluster = request.cluster
    most = max(MOST_TIMES * cluster.num_gpus, cluster.gpus_per_node)
    sizes = [cluster.num_gpus + 1]
    while sizes[-1] < most:
        sizes.append(cluster.num_gpus * 2 ** len(sizes))
    for size in dict.fromkeys(sizes):
        is_whole = size <= cluster.gpus_per_node or size % cluster.gpus_per_node == 0
        if is_whole and size <= most:
            larger = replace(request, cluster=replace(cluster, num_gpus=size))
            yield Change(f"gpus={size}", "gpus", larger)


def _shorter(request: Request) -> Iterator[Change]:
    seq_len = request.job.seq_len // 2
    while seq_len >= SHORTEST:
        shorter = replace(request, job=replace(request.job, seq_len=seq_len), lengths=None)
        yield Change(f"seq_len={seq_len}", "seq_len", shorter)
        seq_len //= 2


def both(first: Change, second: Change, request: Request) -> Change | None:
    """Two changes of one request together; None where both move the same setting."""
    if first.kind == second.kind:
        return None
    merged = _merged(request, first.request, second.request)
    return Change(f"{first.words} {second.words}", f"{first.kind}+{second.kind}", merged)


def _merged(base: Request, first: Request, second: Request) -> Request:
    """What either has changed of `base`."""
    changed = {
        name: value
        for name in base.__dataclass_fields__
        if (value := getattr(second, name)) != getattr(base, name)
    }
    merged = replace(first, **{name: v for name, v in changed.items() if name != "job"})
    fields = {
        name: value
        for name in base.job.__dataclass_fields__
        if (value := getattr(second.job, name)) != getattr(base.job, name)
    }
    return replace(merged, job=replace(first.job, **fields))
