"""The formula's answer for one step: ledger, peak, instant, levels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from src.architecture import describe
from src.memory.columns import answer, columns
from src.memory.instants import Column
from src.memory.levels import level_model
from src.memory.losses import num_chunks
from src.memory.pools import Pools
from src.memory.size import ZERO, Shape
from src.memory.terms import Instant, Term
from src.spec import Gpu, Job, Layout, Method, Step
from src.units import Levels

LOSS_BLOCKS = 3
"""The loss's backward holds three blocks as large as the logits. Replays through the simulated
allocator strand about one more: freed blocks of half-precision logits that none of them fits."""

Ledger = Mapping[Instant, Mapping[Term, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What an estimator says of one step.

    Attributes:
        peak_bytes: per level, on the fullest GPU.
        upper_bytes: upper bound per level.
        peak_instant: the instant that sets the peak.
        ledger: instants x terms in bytes, level `allocated`; terms add up to their column.
        host_bytes: host memory that one GPU's process needs for what is offloaded.
        notes: what a reader has to know.
    """

    peak_bytes: Levels
    upper_bytes: Levels
    peak_instant: Instant
    ledger: Ledger
    host_bytes: int = 0
    notes: tuple[str, ...] = ()


def ledger_of(step: Step) -> dict[Instant, dict[Term, int]]:
    """Instants x terms in whole bytes; only terms that are not 0.

    Every tensor counts with its own bytes; rounding each block up to 512 B, as the allocator does,
    is left out (under 0.1 % for models above 100 M parameters).

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    shape = _shape(step.job, step.micro_batch, step.job.seq_len)
    return _ledger(columns(step.job, step.method, step.layout, step.gpu), shape)


def _ledger(found: Iterable[Column], shape: Shape) -> dict[Instant, dict[Term, int]]:
    largest: dict[Instant, tuple[float, Column]] = {}
    for column in found:
        size = column.size.at(shape)
        if column.instant not in largest or largest[column.instant][0] < size:
            largest[column.instant] = (size, column)
    return {
        instant: {
            term: cell for term, size in column.terms.items() if (cell := round(size.at(shape)))
        }
        for instant, (_, column) in largest.items()
    }


def peak_allocated(
    job: Job, method: Method, layout: Layout, gpu: Gpu, *, micro_batch: Any, seq_len: Any
) -> Any:
    """Peak allocated bytes; micro batch and sequence may be numpy arrays.

    An array of lengths is taken to lie where `job.seq_len` does: beyond the same sliding windows.

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    shape = _shape(job, micro_batch, seq_len)
    if isinstance(seq_len, int) and seq_len != job.seq_len:
        job = replace(job, seq_len=seq_len)
    peak: Any = 0
    for column in columns(job, method, layout, gpu):
        size = column.size.at(shape)
        peak = max(peak, size) if isinstance(size, int | float) else _larger(peak, size)
    return peak


def stranded_allocated(
    job: Job, method: Method, layout: Layout, gpu: Gpu, *, micro_batch: Any, seq_len: int
) -> Any:
    """Allocated bytes of the loss and a block of it that nothing else fits in; arrays as above.

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    shape = _shape(job, micro_batch, seq_len)
    most: Any = 0
    stranded: Any = 0
    for column in columns(job, method, layout, gpu):
        if column.instant is Instant.LOSS_BACKWARD:
            size = column.size.at(shape)
            loss = column.terms.get(Term.LOSS_TEMPORARIES, ZERO).at(shape) // LOSS_BLOCKS
            is_more = size > most
            stranded = stranded + (loss - stranded) * is_more
            most = most + (size - most) * is_more
    return most + stranded


def _shape(job: Job, micro_batch: Any, seq_len: Any) -> Shape:
    chunks = num_chunks(describe(job.model), job.loss)
    length = seq_len + job.finetune.prompt_length
    return Shape.of(micro_batch, length, num_chunks=chunks)


def _larger(left: Any, right: Any) -> Any:
    """Elementwise maximum without importing numpy."""
    return left + (right - left) * (right > left)


def estimate_step(step: Step) -> Estimate:
    """The formula's answer.

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    found = answer(step.job, step.method, step.layout, step.gpu)
    shape = _shape(step.job, step.micro_batch, step.job.seq_len)
    ledger = _ledger(found.columns, shape)
    totals = {instant: sum(cells.values()) for instant, cells in ledger.items()}
    peak_instant = max(totals, key=lambda instant: totals[instant])
    levels = level_model(step.layout, step.gpu)
    pooled = (
        None if levels.is_full(totals[peak_instant]) else _pooled(step, found.pools, shape, ledger)
    )
    loss = ledger[Instant.LOSS_BACKWARD]
    stranded = loss.get(Term.LOSS_TEMPORARIES, 0) // LOSS_BLOCKS
    return Estimate(
        peak_bytes=levels.estimate(totals[peak_instant], pooled=pooled),
        upper_bytes=levels.upper(
            totals[peak_instant], pooled=pooled, fragmented=totals[Instant.LOSS_BACKWARD] + stranded
        ),
        peak_instant=peak_instant,
        ledger=ledger,
        host_bytes=round(found.host.at(shape)),
    )


def host_activation_bytes(step: Step, micro_batch: Any = None) -> Any:
    """Bytes that one micro step moves to host memory and back to keep activations there.

    Args:
        step: the step.
        micro_batch: in place of the step's; may be a numpy array.

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    found = answer(step.job, step.method, step.layout, step.gpu)
    batch = step.micro_batch if micro_batch is None else micro_batch
    return found.moved.at(_shape(step.job, batch, step.job.seq_len))


def _pooled(step: Step, pools: Pools, shape: Shape, ledger: Ledger) -> float:
    """Bytes of all pools: the most that a micro batch up to the step's needs."""
    before = _at_turns(step.job, step.method, step.layout, step.gpu) if pools.turns else ()
    fewer = [num_bytes for tokens, num_bytes in before if tokens < shape.tokens]
    return max([pools.at(shape, ledger), *fewer])


@lru_cache(maxsize=4096)
def _at_turns(
    job: Job, method: Method, layout: Layout, gpu: Gpu
) -> tuple[tuple[float, float], ...]:
    """Tokens at which the pools turn, and their bytes there."""
    found, one = answer(job, method, layout, gpu), _shape(job, 1, job.seq_len)
    at = [(tokens, one.repeated(tokens / one.tokens)) for tokens in found.pools.turns]
    return tuple(
        (tokens, found.pools.at(shape, _ledger(found.columns, shape))) for tokens, shape in at
    )
