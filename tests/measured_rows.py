"""Jobs, their steps, and measured rows of them that say what the formula says."""

from __future__ import annotations

import json
from typing import Any

from src.config import compose_keywords, to_request
from src.measure.client import case_of
from src.memory import estimate_step
from src.record import Outcome, Provenance, Row, Source
from src.spec import Layout, Method, Request, Step


def asked(**keys: Any) -> Request:
    usual = {"model": "opt-125m", "gpu": "a100-80gb", "micro_batch": 4, "method": ["single"]}
    return to_request(compose_keywords({**usual, **keys})).request


def step_of(request: Request, method: Method = Method.SINGLE, num_gpus: int = 1) -> Step:
    return Step(
        job=request.job,
        method=method,
        layout=Layout(dp=num_gpus, shard=num_gpus if method.is_fsdp else 1),
        gpu=request.cluster.gpu,
        micro_batch=request.micro_batch or 4,
    )


def row_of(step: Step, *, loop: dict[str, Any] | None = None, **more: Any) -> Row:
    """A measured row that says what the formula says."""
    estimate = estimate_step(step)
    peak = estimate.peak_bytes
    case = {**json.loads(json.dumps(case_of(step))), "device": "cuda", "loop": loop or {}}
    usual: dict[str, Any] = {
        "case": case,
        "outcome": Outcome.OK,
        "source": Source.MEASURED,
        "provenance": Provenance(
            campaign="mine", started="2026-01-02T03:04:05+00:00", duration_s=1.0
        ),
        "peak_bytes": {
            "allocated": peak.allocated,
            "reserved": peak.reserved,
            "device": peak.device,
        },
        "peak_instant": estimate.peak_instant.value,
        "instants": {
            instant.value: {"allocated": sum(column.values())}
            for instant, column in estimate.ledger.items()
        },
    }
    return Row(**{**usual, **more})
