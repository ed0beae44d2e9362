"""Requests and stand-in estimators for tests of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from src.memory import Estimate, Instant, Term
from src.spec import Cluster, Job, Method, Request, Step
from src.units import GIB, Levels
from tests.jobs import gpu, zoo_model

REQUEST_KEYS = ("methods", "tp", "micro_batch", "estimator", "policy", "lengths", "solve")


def request_of(
    name: str = "opt-1.3b",
    gpus: int = 4,
    *,
    sku: str = "a100-80gb",
    gpus_per_node: int = 8,
    **keys: Any,
) -> Request:
    """A request about a model of the zoo; other keys go to the request or to the job."""
    mine = {key: keys.pop(key) for key in REQUEST_KEYS if key in keys}
    cluster = Cluster(gpu=gpu(sku), num_gpus=gpus, gpus_per_node=gpus_per_node)
    return Request(job=Job(model=zoo_model(name), **keys), cluster=cluster, **mine)


def estimate_of(peak: float, upper: float | None = None) -> Estimate:
    """An estimate of so many bytes at every level."""
    bytes_, bound = round(peak), round(peak if upper is None else upper)
    return Estimate(
        peak_bytes=Levels(allocated=bytes_, reserved=bytes_, device=bytes_),
        upper_bytes=Levels(allocated=bound, reserved=bound, device=bound),
        peak_instant=Instant.FORWARD_END,
        ledger={Instant.FORWARD_END: {Term.LOGITS: bytes_}},
    )


@dataclass
class PerMethod:
    """An estimator that needs so many GiB per method, and `slope` GiB more per sequence.

    Attributes:
        needs: GiB of each method; other methods need `otherwise`.
        slope: GiB per sequence.
        margin: the upper bound is that many times the estimate.
        asked: the micro batches that were asked for.
    """

    needs: dict[Method, float] = field(default_factory=dict)
    otherwise: float = 1000.0
    slope: float = 0.0
    margin: float = 1.0
    asked: list[int] = field(default_factory=list)

    def __call__(self, step: Step) -> Estimate:
        self.asked.append(step.micro_batch)
        gib = self.needs.get(step.method, self.otherwise) + self.slope * step.micro_batch
        return estimate_of(gib * GIB, gib * self.margin * GIB)


def counting(answer: Callable[[int], float]) -> Callable[[Step], Estimate]:
    """An estimator that needs `answer(micro_batch)` bytes."""
    return lambda step: estimate_of(answer(step.micro_batch))
