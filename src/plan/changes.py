"""What would have to change where nothing fits: single changes, each tried by recomputing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from src.spec import Checkpointing, FinetuneKind, Optimizer, Precision, Request

MOST_GPUS = 1024


def single_changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Requests that differ in one setting, with the words for the change, cheapest first."""
    job = request.job
    if (request.micro_batch or 1) > 1:
        yield "micro_batch=1", replace(request, micro_batch=1)
    if job.checkpointing is not Checkpointing.FULL:
        yield (
            "checkpointing=full",
            replace(request, job=replace(job, checkpointing=Checkpointing.FULL)),
        )
    if job.optimizer is Optimizer.ADAMW:
        yield (
            "optimizer=adamw-fused",
            replace(request, job=replace(job, optimizer=Optimizer.ADAMW_FUSED)),
        )
    if request.methods:
        yield "method=all", replace(request, methods=())
    if request.tp is not None:
        yield "tp=null", replace(request, tp=None)
    if not job.finetune.is_lora:
        lora = replace(job.finetune, kind=FinetuneKind.LORA)
        yield "finetune=lora", replace(request, job=replace(job, finetune=lora))
    has_bf16 = request.cluster.gpu.bf16_tflops is not None
    if has_bf16 and job.precision is not Precision.BF16_TRUE and not request.methods:
        yield (
            "precision=bf16-true",
            replace(request, job=replace(job, precision=Precision.BF16_TRUE)),
        )
    yield from _more_gpus(request)
    yield from _shorter(request)


def _more_gpus(request: Request) -> Iterator[tuple[str, Request]]:
    cluster = request.cluster
    gpus = cluster.num_gpus * 2
    while gpus <= MOST_GPUS:
        if gpus <= cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0:
            yield f"gpus={gpus}", replace(request, cluster=replace(cluster, num_gpus=gpus))
        gpus *= 2


def _shorter(request: Request) -> Iterator[tuple[str, Request]]:
    seq_len = request.job.seq_len // 2
    while seq_len >= 128:
        yield f"seq_len={seq_len}", replace(request, job=replace(request.job, seq_len=seq_len))
        seq_len //= 2


def changes_that_fit(request: Request, fits: Callable[[Request], bool]) -> tuple[str, ...]:
    """Words for those single changes after which something fits; the smallest of each kind."""
    found: list[str] = []
    kinds: set[str] = set()
    for words, changed in single_changes(request):
        kind = words.split("=", 1)[0]
        if kind not in kinds and fits(changed):
            kinds.add(kind)
            found.append(words)
    return tuple(found)
