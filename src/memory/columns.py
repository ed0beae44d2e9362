"""The ledger as a function of the shape: instants x terms, every cell a `Size`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from src.architecture import describe
from src.memory.coverage import require_covered
from src.memory.instants import Column, candidates
from src.memory.kernels import choose_kernel
from src.memory.parts import parts_of
from src.memory.pools import Pools, pools_of
from src.memory.size import Size, undominated
from src.memory.terms import Instant
from src.spec import Attention, Gpu, Interconnect, Job, Layout, Method, uneven_sequence


def columns(job: Job, method: Method, layout: Layout, gpu: Gpu) -> tuple[Column, ...]:
    """Every column that is an instant's largest at some shape; raises as `answer`."""
    return answer(job, method, layout, gpu).columns


def answer(job: Job, method: Method, layout: Layout, gpu: Gpu) -> Answer:
    """All that the formula says of a job under a method.

    Sizes are functions of the sequence length; `job.seq_len` only decides whether it passes a
    sliding window, where attention is given a mask.

    Raises:
        NotCoveredError: the formula lacks a term that the job needs.
        UserError: the config or the attention implementation is impossible.
    """
    require_covered(job, method)
    uneven = uneven_sequence(job, layout)
    if uneven is not None:
        raise uneven
    if job.attention is Attention.FLASH:
        choose_kernel(describe(job.model), job, gpu)
    return _answer(_canonical(job), method, layout, _alike(gpu.compute_capability))


def _canonical(job: Job) -> Job:
    """The job with the shortest sequence that passes the same sliding windows."""
    windows, prompt = describe(job.model).windows, job.finetune.prompt_length
    passed = [window for window in windows if window is not None and window <= job.model_seq_len]
    shortest = max(max(passed, default=1) - prompt, 1)
    return job if job.seq_len == shortest else replace(job, seq_len=shortest)


class Answer(NamedTuple):
    """Everything that does not depend on the shape.

    Attributes:
        columns: every column that is an instant's largest at some shape, in the order of instants.
        host: bytes in host memory that one GPU's process needs for what is offloaded.
        moved: those of them that a micro step moves there and back.
        pools: what the allocator's pools need.
    """

    columns: tuple[Column, ...]
    host: Size
    moved: Size
    pools: Pools


@lru_cache(maxsize=16)
def _alike(compute_capability: tuple[int, int]) -> Gpu:
    """A GPU for all of one compute capability: nothing else of it moves a column."""
    return Gpu(
        sku="any",
        name="any",
        compute_capability=compute_capability,
        usable_gib=0.0,
        context_mib=None,
        memory_bandwidth_gbps=0.0,
        bf16_tflops=None,
        fp16_tflops=0.0,
        tf32_tflops=None,
        fp32_tflops=0.0,
        interconnect=Interconnect.PCIE,
        link_gbps=0.0,
        gpus_per_node=1,
        sm_count=0,
    )


@lru_cache(maxsize=4096)
def _answer(job: Job, method: Method, layout: Layout, gpu: Gpu) -> Answer:
    parts = parts_of(job, method, layout, gpu)
    found = candidates(parts)
    by_instant = [
        undominated(column for column in found if column.instant is instant) for instant in Instant
    ]
    kept = tuple(column for found in by_instant for column in found)
    moved = parts.on_host()
    return Answer(
        columns=kept,
        host=parts.placement.host().plus(moved),
        moved=moved,
        pools=pools_of(parts, kept),
    )
