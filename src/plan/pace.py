"""How fast steps really were, as factors of the step-time model's parts.

Least squares of the relative error, drawn towards the model: with few rows, or of a part that no
row speaks of, the factor stays near 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol, runtime_checkable

from src.architecture import describe
from src.errors import UserError
from src.plan.search import Estimator
from src.plan.throughput import MODELLED, Pace, StepTime, step_time
from src.record import Outcome, Row, Source
from src.spec import Cluster, Step

MIN_ROWS = 12
"""Steps below which nothing is fitted: four for each factor."""

PULL = 0.05
"""Weight of the model, in rows that consist of one part alone."""

LIMITS = (0.1, 20.0)
"""A factor beyond them is another step than the row says, or another GPU."""


@runtime_checkable
class Paced(Protocol):
    """An estimator that knows how fast steps were."""

    @property
    def pace(self) -> Mapping[str, float]:
        """The pace, as plain values; empty where nothing was measured."""


def estimators_pace(estimator: Estimator) -> Pace:
    """The pace that an estimator knows; the model's where it knows none."""
    return pace_of(estimator.pace) if isinstance(estimator, Paced) else MODELLED


def is_timed(row: Row) -> bool:
    """Whether a row's seconds are those of a real step, communication included."""
    has_time = row.numbers.get("step_seconds", 0) > 0
    is_clean = not row.numbers.get("num_alloc_retries")
    return (
        row.source is Source.MEASURED
        and row.outcome is Outcome.OK
        and row.comm != "fake"
        and has_time
        and is_clean
    )


def modelled(step: Step) -> StepTime:
    """The model's parts of a step, on nodes of the GPU's usual size."""
    node = min(step.gpu.gpus_per_node, step.layout.num_gpus)
    cluster = Cluster(gpu=step.gpu, num_gpus=step.layout.num_gpus, gpus_per_node=node)
    return step_time(step, cluster, describe(step.job.model))


def pace_of_rows(rows: Iterable[Row], step_of: Callable[[Row], Step]) -> Pace | None:
    """The pace of the rows that were timed; None where they are too few.

    Args:
        rows: rows of any sort.
        step_of: the step of one; may raise UserError, then the row is left out.
    """
    timed = []
    for row in rows:
        if is_timed(row):
            with suppress(UserError):
                timed.append((modelled(step_of(row)), row.numbers["step_seconds"]))
    return fit_pace(timed)


def fit_pace(steps: Iterable[tuple[StepTime, float]]) -> Pace | None:
    """The pace of measured steps; None where there are too few.

    Args:
        steps: the model's parts of each, and its measured seconds.
    """
    import numpy as np

    pairs = list(steps)
    if len(pairs) < MIN_ROWS:
        return None
    parts = np.array(
        [(time.compute, time.traffic + time.optimizer, time.exposed) for time, _ in pairs]
    )
    shares = parts / np.array([seconds for _, seconds in pairs])[:, None]
    waited = np.array([time.launch / seconds for time, seconds in pairs])
    matrix = shares.T @ shares + PULL * np.eye(3)
    factors = 1 + np.linalg.solve(matrix, shares.T @ (1 - waited - shares.sum(axis=1)))
    compute, memory, communication = np.clip(factors, *LIMITS).tolist()
    return Pace(compute=compute, memory=memory, communication=communication, num_rows=len(pairs))


def pace_values(pace: Pace | None) -> dict[str, float]:
    """A pace as plain values, to be kept; none of it where there is none."""
    return {} if pace is None else asdict(pace)


def pace_of(values: Mapping[str, float]) -> Pace:
    """A pace from plain values; the model's where there are none."""
    return Pace(
        compute=float(values.get("compute", 1.0)),
        memory=float(values.get("memory", 1.0)),
        communication=float(values.get("communication", 1.0)),
        num_rows=int(values.get("num_rows", 0)),
    )
