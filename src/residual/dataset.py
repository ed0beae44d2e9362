"""Rows joined with the formula computed now: what corrections are fitted to and judged by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from src.architecture.losses import UPCASTS_4X, Upcast4x
from src.errors import NotCoveredError, UserError
from src.memory import Estimate, estimate_step
from src.record import LENGTHS, LEVELS, VARYING, Outcome, Row, Source
from src.residual.facts import Array, Facts, Table, facts_of
from src.spec import Loss, Step

MOST_OFF = log(3.0)
"""A row whose bytes are further from the formula than this factor is of another unit, or of another
step than it says."""

OTHER_FSDP = (
    "FSDP1 keeps the inputs of frozen units to the end of the backward pass, fully_shard does not"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One row, joined.

    Attributes:
        row_id: the row's.
        source: the row's.
        family: `model_type` of the model.
        method, gpu: values by which rows are left out.
        facts: what a correction sees.
        measured: level -> bytes that estimates are compared with; empty after an OOM.
        stated: level -> bytes, compared or not: what lies beyond measured allocated bytes can be
            learned from a step that is none of the formula's.
        is_oom: whether the step did not fit.
        versions: library -> version.
        url: where it was published.
    """

    row_id: str
    source: Source
    family: str
    method: str
    gpu: str
    facts: Facts
    measured: Mapping[str, int]
    stated: Mapping[str, int]
    is_oom: bool
    versions: Mapping[str, str]
    url: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A row, or one level of it, that is not used.

    Attributes:
        row_id: the row's.
        reason: why.
    """

    row_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in the order of their ids, and what was left out.

    Attributes:
        samples: the rows that are used.
        refused: those that are not, or not at every level, with the reason.
    """

    samples: tuple[Sample, ...]
    refused: tuple[Refused, ...] = ()

    @cached_property
    def table(self) -> Table:
        """The facts of all samples."""
        return Table.of([sample.facts for sample in self.samples])

    def stated(self, level: str) -> Array:
        """Measured bytes at a level, NaN where they are not known; of shape (n,)."""
        return np.array(
            [sample.stated.get(level, np.nan) for sample in self.samples], dtype=np.float64
        )

    def measured(self, level: str) -> Array:
        """Measured bytes at a level, NaN where they are not compared; of shape (n,)."""
        return np.array(
            [sample.measured.get(level, np.nan) for sample in self.samples], dtype=np.float64
        )

    @cached_property
    def is_oom(self) -> npt.NDArray[np.bool_]:
        """Of shape (n,)."""
        return np.array([sample.is_oom for sample in self.samples], dtype=np.bool_)

    def labels(self, name: str) -> list[str]:
        """`family`, `method` or `gpu` of each sample."""
        return [str(getattr(sample, name)) for sample in self.samples]

    @cached_property
    def rows_hash(self) -> str:
        """Names the rows that are used, whatever their order."""
        ids = ",".join(sorted(sample.row_id for sample in self.samples))
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def only(self, ids: Iterable[str]) -> npt.NDArray[np.bool_]:
        """A mask of the samples with these ids; of shape (n,)."""
        wanted = set(ids)
        return np.array([sample.row_id in wanted for sample in self.samples], dtype=np.bool_)


def join(
    rows: Sequence[Row],
    step_of: Callable[[Mapping[str, Any]], Step],
    *,
    estimator: Callable[[Step], Estimate] = estimate_step,
) -> Dataset:
    """The dataset of some rows; what cannot be used is refused one by one, never dropped silently.

    Args:
        rows: measured and published ones.
        step_of: the step that a row's case describes.
        estimator: the formula.
    """
    refused: list[Refused] = []
    samples: dict[str, Sample] = {}
    for row in rows:
        row_id = row.row_id
        if row_id in samples:
            refused.append(Refused(row_id=row_id, reason="the same row twice"))
            continue
        try:
            check_usable(row)
            sample, left_out = _sample(row, step_of(row.case), estimator)
        except UserError as error:
            refused.append(Refused(row_id=row_id, reason=_reason(error)))
        else:
            samples[row_id] = sample
            refused += [Refused(row_id=row_id, reason=reason) for reason in left_out]
    ordered = tuple(samples[row_id] for row_id in sorted(samples))
    return Dataset(samples=ordered, refused=tuple(refused))


def _reason(error: UserError) -> str:
    if isinstance(error, NotCoveredError):
        return f"not covered by the formula: {error}"
    return error.allowed if error.key == "row" else str(error)


def check_usable(row: Row) -> None:
    """Refuse what is no clean measurement.

    Raises:
        UserError: says why.
    """

    def refuse(reason: str) -> UserError:
        return UserError(key="row", value=row.row_id, allowed=reason)

    if row.source is Source.SIMULATED:
        raise refuse("simulated rows are never a target")
    if row.outcome not in (Outcome.OK, Outcome.OOM):
        raise refuse(f"outcome {row.outcome}: it has no peak")
    if row.environment.get(LENGTHS) == VARYING:
        raise refuse("sequences of any length: how long the largest step's were is not known")
    if row.outcome is Outcome.OOM:
        return
    if row.numbers.get("num_alloc_retries") or row.numbers.get("num_ooms"):
        raise refuse("the allocator had to give back its cache: no clean peak")
    _check_peaks(row.peak_bytes, refuse)


def _check_peaks(peaks: Mapping[str, int], refuse: Callable[[str], UserError]) -> None:
    if not peaks:
        raise refuse("it states no peak")
    for level, size in peaks.items():
        if level not in LEVELS or isinstance(size, bool) or not isinstance(size, int):
            raise refuse(f"peak_bytes.{level}: {size!r} are no whole bytes of a known level")
        if size <= 0:
            raise refuse(f"peak_bytes.{level}: {size} is no peak")
    in_order = [peaks[level] for level in LEVELS if level in peaks]
    if in_order != sorted(in_order):
        raise refuse(f"peaks do not rise from level to level: {dict(peaks)}")


def _sample(
    row: Row, step: Step, estimator: Callable[[Step], Estimate]
) -> tuple[Sample, list[str]]:
    """The joined row, and why a level of it is not compared."""
    facts = facts_of(step, estimator(step))
    is_oom = row.outcome is Outcome.OOM
    stated = {} if is_oom else dict(row.peak_bytes)
    _check_loop(row, step)
    measured, left_out = stated, []
    if _is_other_fsdp(row.case, step):
        measured, left_out = {}, [f"not compared, its slack is learned from: {OTHER_FSDP}"]
        if "allocated" not in stated:
            raise UserError(key="row", value=row.row_id, allowed=OTHER_FSDP)
    for level, size in measured.items():
        ratio = size / getattr(facts.formula, level)
        if abs(log(ratio)) > MOST_OFF:
            reason = (
                f"{level} is {ratio:.3g} times the formula's, beyond {exp(MOST_OFF):g}: another "
                "unit, or another step than the case says"
            )
            raise UserError(key="row", value=row.row_id, allowed=reason)
    sample = Sample(
        row_id=row.row_id,
        source=row.source,
        family=step.job.model.model_type,
        method=step.method.value,
        gpu=step.gpu.sku,
        facts=facts,
        measured=measured,
        stated=stated,
        is_oom=is_oom,
        versions=row.versions,
        url=row.provenance.url,
    )
    return sample, left_out


def _is_other_fsdp(case: Mapping[str, Any], step: Step) -> bool:
    loop = case.get("loop") or {}
    return bool(loop.get("fsdp1")) and not step.job.finetune.trains_everything


def _check_loop(row: Row, step: Step) -> None:
    """Refuse a loop whose logits are others than the formula's.

    Raises:
        UserError: says why.
    """
    loop, job = row.case.get("loop") or {}, step.job
    is_half = UPCASTS_4X.get(job.model.model_type) is Upcast4x.NONE
    if loop.get("autocast_half_weights") and job.loss is Loss.STANDARD_4X and is_half:
        allowed = (
            "autocast over half-precision weights turns logits to fp32 that this family leaves as "
            "they are, and no precision says so"
        )
        raise UserError(key="row", value=row.row_id, allowed=allowed)
