"""What `src.estimate` answers: frozen, with the names of the JSON schema (version 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from src.plan.gap.result import Gap
from src.spec import EstimatorKind, Gpu, Layout, Method, Request, Unknown, Verdict
from src.units import Levels

SCHEMA_VERSION = 1

Ledger = Mapping[str, Mapping[str, int]]
"""instant -> term -> bytes on one GPU, at the level `allocated`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodReport:
    """One method with one layout.

    Attributes:
        method: how the job is spread.
        layout: its degrees.
        micro_batch: sequences per GPU per forward pass that the peak speaks of: the one asked for,
            else the largest that fits, else 1.
        peak_bytes: the estimate on the fullest GPU, per level.
        upper_bytes: its upper bound, per level.
        peak_instant: the instant that sets the peak.
        ledger: instants x terms in bytes, level `allocated`.
        max_micro_batch: the largest micro batch that fits; 0 where not even 1 does.
        tokens_per_second: of all GPUs together at `micro_batch`; None where the verdict is `oom`,
            or the formula does not know the model.
        verdict: fits, tight or oom.
        expected_bytes: mean of the estimate over micro batches of sequences of different lengths,
            each padded to its longest, per level; None where all have one length. Everything else
            speaks of the longest.
        host_bytes: host memory of one GPU's process for what is offloaded; None where the estimator
            does not know it.
        notes: what a reader has to know about this row.
    """

    method: Method
    layout: Layout
    micro_batch: int
    peak_bytes: Levels
    upper_bytes: Levels
    peak_instant: str
    ledger: Ledger
    max_micro_batch: int
    tokens_per_second: float | None
    verdict: Verdict
    expected_bytes: Levels | None = None
    host_bytes: int | None = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The method to run, and why it and not another."""

    method: Method
    layout: Layout
    micro_batch: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """The model as it was understood.

    Attributes:
        num_parameters: the model's own parameters, tied ones once, without adapters.
        num_trainable_parameters: those that are trained, adapters included.
    """

    name: str
    hf_id: str | None
    model_type: str
    num_parameters: int
    num_trainable_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The learned correction that was applied, and what it was learned from."""

    model: str
    rows: int
    source: str
    in_range: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Settings to change, and what becomes of the job then; all numbers are recomputed.

    Attributes:
        changes: the keys to type, `key=value`, separated by spaces.
        method: the fastest method that fits then, else the one that needs least; its layout.
        micro_batch: sequences per GPU per forward pass.
        upper_bytes: upper bound at the level device.
        saved_bytes: how much less that is than without the change.
        seconds_per_token: of all GPUs together.
        time_ratio: that over the one without the change.
        verdict: with the change.
    """

    changes: str
    method: Method
    layout: Layout
    micro_batch: int
    upper_bytes: int
    saved_bytes: int
    seconds_per_token: float
    time_ratio: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """One value with which the job fits.

    Attributes:
        gpu: short name of the GPU model.
        num_gpus: GPUs of the job.
        method: how it is spread.
        layout: the method's degrees.
        value: the value of the open field: the largest that fits, or the smallest; None where none
            does.
        upper_bytes: upper bound at the level device, with that value.
        is_limit: whether the search stopped at its own limit and not at the card's.
    """

    gpu: str
    num_gpus: int
    method: Method
    layout: Layout
    value: int | None
    upper_bytes: int | None
    is_limit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The answer to `solve=KEY`.

    Attributes:
        key: the open field.
        solutions: one per method and layout, or per GPU model; the best first.
    """

    key: Unknown
    solutions: tuple[Solution, ...]

    @property
    def best(self) -> Solution | None:
        """The first; None where nothing fits at any value."""
        first = self.solutions[0] if self.solutions else None
        return None if first is None or first.value is None else first


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer.

    Attributes:
        request: the question with every default filled in.
        model: the model as it was understood.
        gpu: the GPU the verdicts are about.
        estimator: who answered.
        methods: one entry per method and layout, the recommended first, then by throughput.
        recommended: the method to run; None where nothing fits.
        calibration: the correction applied; None for the formula alone.
        advice: what to change, where nothing fits or something would be faster.
        solved: the open field's values; None where none was left open.
        measured: the gap to what was measured; None where nothing was given.
        warnings: what the reader has to know about the whole answer; what would have to change
            when nothing fits.
    """

    request: Request
    model: ModelSummary
    gpu: Gpu
    estimator: EstimatorKind
    methods: tuple[MethodReport, ...]
    recommended: Recommendation | None
    calibration: Calibration | None
    advice: tuple[Advice, ...] = ()
    solved: Solved | None = None
    measured: Gap | None = None
    warnings: tuple[str, ...] = ()
