"""Every layout of a job on a cluster, with memory and time of each: for many at once.

Memory by the formula (`peak_allocated` takes arrays of micro batches), time by the step-time model;
no correction, no pools: what is picked here is worth asking about for itself. One block of rows is
one method on one layout, at every micro batch that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from src.architecture import Decoder, describe
from src.errors import UserError
from src.memory import peak_allocated, stranded_allocated
from src.memory.levels import level_model
from src.plan.layouts import asked_degrees
from src.plan.throughput import step_time
from src.spec import EstimatorKind, Job, Layout, Method, Policy, Request, Step, refusal

MOST_GPUS = 16_384
MOST_MICRO_BATCH = 4096
"""Where a block ends: nothing gets faster per token beyond."""

_BY_FORMULA = (EstimatorKind.AUTO, EstimatorKind.FORMULA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One method on one layout at n micro batches.

    Attributes:
        method: the method.
        layout: the degrees.
        sequence_parallel: whether norms and dropouts are split along the sequence.
        micro_batch: of shape (n,), rising.
        allocated, device: bytes on the fullest GPU, of shape (n,).
        fits: whether a step is sure to fit, of shape (n,).
        seconds: of one optimizer step, of shape (n,).
        tokens_per_second: of all GPUs, of shape (n,).
    """

    method: Method
    layout: Layout
    sequence_parallel: bool
    micro_batch: Any
    allocated: Any
    device: Any
    fits: Any
    seconds: Any
    tokens_per_second: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One row of a block; its fields are the columns of every form."""

    method: str
    dp: int
    tp: int
    shard: int
    sequence_parallel: bool
    micro_batch: int
    allocated_bytes: int
    device_bytes: int
    fits: bool
    step_seconds: float
    tokens_per_second: float


def blocks(request: Request) -> Iterator[Block]:
    """Every block of a request.

    Raises:
        UserError: the estimator cannot answer for many at once, there are too many GPUs, or
            nothing that was asked for is possible.
    """
    if request.estimator not in _BY_FORMULA:
        allowed = "without layouts: many layouts at once are answered by the formula"
        raise UserError(key="estimator", value=request.estimator, allowed=allowed)
    if request.policy is not Policy.FASTEST:
        allowed = "without layouts: nothing is recommended there"
        raise UserError(key="policy", value=request.policy, allowed=allowed)
    if request.cluster.num_gpus > MOST_GPUS:
        allowed = f"at most {MOST_GPUS:,} with layouts"
        raise UserError(key="gpus", value=request.cluster.num_gpus, allowed=allowed)
    decoder = describe(request.job.model)
    found = _possible(request, decoder)
    first = next(found, None)
    if first is None:
        allowed = f"no layout of {request.cluster.num_gpus} GPUs"
        raise UserError(key="method", value=_names(request), allowed=allowed)
    return chain([first], found)


def _names(request: Request) -> str:
    return ",".join(request.methods) or "all"


def _possible(request: Request, decoder: Decoder) -> Iterator[Block]:
    """Blocks of what runs; the reason of the first that does not, where none does."""
    refused, some = None, False
    for method, layout in _layouts(request, decoder):
        for job in _jobs(request.job, method):
            step = Step(
                job=job, method=method, layout=layout, gpu=request.cluster.gpu, micro_batch=1
            )
            try:
                block = _block(request, decoder, step)
            except UserError as error:
                refused = refused or error
            else:
                some = True
                yield block
    if refused is not None and not some:
        raise refused


def _layouts(request: Request, decoder: Decoder) -> Iterator[tuple[Method, Layout]]:
    """Every method with every degree: tensor parallelism within a node, shards of any divisor."""
    num_gpus, degrees = request.cluster.num_gpus, list(asked_degrees(request, decoder))
    if request.tp in (None, 1):
        degrees.insert(0, 1)
    for method in request.methods or tuple(Method):
        impossible = refusal(request.job, method)
        if impossible is not None and request.methods:
            raise impossible
        if impossible is None:
            for tp in degrees:
                for layout in _of_method(method, num_gpus // tp, tp):
                    yield method, layout


def _of_method(method: Method, dp: int, tp: int) -> Iterator[Layout]:
    """Layouts of a method for so many replicas of so many parts."""
    is_split, is_single = method.has_tensor_parallel, method is Method.SINGLE
    if is_split is not (tp > 1) or is_single is not (dp * tp == 1):
        return
    if is_single or method is Method.TP:
        if dp == 1:
            yield Layout(tp=tp)
    elif dp > 1:
        if method in (Method.HSDP, Method.FSDP_TP):
            largest = dp if method is Method.FSDP_TP else dp - 1
            shards = [shard for shard in range(2, largest + 1) if dp % shard == 0]
        else:
            shards = [dp if method.is_fsdp or method.is_zero else 1]
        for shard in shards:
            yield Layout(dp=dp, tp=tp, shard=shard)


def _jobs(job: Job, method: Method) -> tuple[Job, ...]:
    """The job, and the same with its sequence split, where the method can."""
    if job.sequence_parallel or not method.has_tensor_parallel:
        return (job,)
    return (job, replace(job, sequence_parallel=True))


def _block(request: Request, decoder: Decoder, step: Step) -> Block:
    """One block: the micro batch that was asked for, else all that fit, else 1."""
    import numpy as np

    levels = level_model(step.layout, step.gpu)
    job = step.job

    def by_batch(measure: Callable[..., Any], batches: Any) -> Any:
        return measure(
            job, step.method, step.layout, step.gpu, micro_batch=batches, seq_len=job.seq_len
        )

    def fit(batches: Any) -> Any:
        allocated = by_batch(peak_allocated, batches)
        return levels.surely_fits(allocated, by_batch(stranded_allocated, batches))

    if request.micro_batch is not None:
        batches = np.array([request.micro_batch])
    else:
        most = 64
        while most < MOST_MICRO_BATCH and fit(most):
            most *= 4
        batches = np.arange(1, most + 1)
        batches = batches[: max(1, int(fit(batches).sum()))]
    allocated = by_batch(peak_allocated, batches)
    seconds = step_time(step, request.cluster, decoder, micro_batch=batches).seconds
    tokens = step.layout.dp * batches * job.seq_len * job.grad_accum
    return Block(
        method=step.method,
        layout=step.layout,
        sequence_parallel=job.sequence_parallel and step.layout.tp > 1,
        micro_batch=batches,
        allocated=allocated,
        device=levels.device_at(allocated),
        fits=fit(batches),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
    )


def points(found: Iterable[Block]) -> Iterator[Point]:
    """Every row, block by block."""
    for block in found:
        for index in range(len(block.micro_batch)):
            yield _point(block, index)


def _point(block: Block, index: int) -> Point:
    return Point(
        method=block.method.value,
        dp=block.layout.dp,
        tp=block.layout.tp,
        shard=block.layout.shard,
        sequence_parallel=block.sequence_parallel,
        micro_batch=int(block.micro_batch[index]),
        allocated_bytes=round(float(block.allocated[index])),
        device_bytes=round(float(block.device[index])),
        fits=bool(block.fits[index]),
        step_seconds=float(block.seconds[index]),
        tokens_per_second=float(block.tokens_per_second[index]),
    )


def pareto(found: Iterable[Block]) -> list[Point]:
    """What fits and is beaten by nothing in both memory and speed; least memory first.

    Of equals the first one stays.
    """
    import numpy as np

    kept = [block for block in found if block.fits.any()]
    if not kept:
        return []
    device = np.concatenate([block.device[block.fits] for block in kept])
    speed = np.concatenate([block.tokens_per_second[block.fits] for block in kept])
    places = [(block, index) for block in kept for index in np.flatnonzero(block.fits).tolist()]
    order = np.lexsort((np.arange(len(device)), -speed, device))
    best = np.maximum.accumulate(speed[order])
    first = np.concatenate([[True], speed[order][1:] > best[:-1]])
    return [_point(*places[index]) for index in order[first].tolist()]


class Fitting:
    """Points as they pass, and whether any of those that have passed fits."""

    def __init__(self, found: Iterable[Point]) -> None:
        self._found = found
        self.any = False

    def __iter__(self) -> Iterator[Point]:
        """Each point once."""
        for point in self._found:
            self.any = self.any or point.fits
            yield point
