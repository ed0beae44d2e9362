"""The answer as JSON, schema_version 1; and the request as the keys a user types."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from src.plan.gap.result import Gap
from src.plan.result import SCHEMA_VERSION, Advice, MethodReport, Report, Solved
from src.spec import FINETUNE_OPTIONS, Finetune, Layout, Lengths, Request


def render_json(report: Report) -> str:
    """The whole answer as one JSON object, indented, with a final line feed."""
    return json.dumps(report_dict(report), indent=2, allow_nan=False) + "\n"


def report_dict(report: Report) -> dict[str, Any]:
    """The answer as plain dicts, lists, text and numbers; byte values are integers, per GPU."""
    recommended = report.recommended
    return {
        "schema_version": SCHEMA_VERSION,
        "request": request_dict(report.request),
        "model": asdict(report.model),
        "lengths": _lengths_dict(report.request.lengths),
        "gpu": {"sku": report.gpu.sku, "usable_bytes": report.gpu.usable_bytes},
        "estimator": report.estimator.value,
        "methods": [_method_dict(method) for method in report.methods],
        "recommended": None
        if recommended is None
        else {
            "method": recommended.method.value,
            "layout": _layout_dict(recommended.layout),
            "micro_batch": recommended.micro_batch,
            "reason": recommended.reason,
        },
        "advice": [_advice_dict(advice) for advice in report.advice],
        "solved": None if report.solved is None else _solved_dict(report.solved),
        "measured": None if report.measured is None else _gap_dict(report.measured),
        "calibration": None if report.calibration is None else asdict(report.calibration),
        "warnings": list(report.warnings),
    }


def _advice_dict(advice: Advice) -> dict[str, Any]:
    return {
        "changes": advice.changes,
        "method": advice.method.value,
        "layout": _layout_dict(advice.layout),
        "micro_batch": advice.micro_batch,
        "upper_bytes": advice.upper_bytes,
        "saved_bytes": advice.saved_bytes,
        "time_ratio": advice.time_ratio,
        "verdict": advice.verdict.value,
    }


def _solved_dict(solved: Solved) -> dict[str, Any]:
    """The open field and what was found, the best first; a null value: nothing fits."""
    return {
        "key": solved.key.value,
        "solutions": [
            {
                "gpu": found.gpu,
                "gpus": found.num_gpus,
                "method": found.method.value,
                "layout": _layout_dict(found.layout),
                "value": found.value,
                "upper_bytes": found.upper_bytes,
                "is_limit": found.is_limit,
            }
            for found in solved.solutions
        ],
    }


def _gap_dict(gap: Gap) -> dict[str, Any]:
    """The gap to what was measured; `docs/measured.md` says what each key is."""
    found = {
        item.name: getattr(gap, item.name)
        for item in fields(Gap)
        if item.name not in ("layout", "levels", "parts", "instants", "settings", "causes")
    }
    return {
        **found,
        "layout": _layout_dict(gap.layout),
        "versions": dict(gap.versions),
        "levels": {
            level.level: {
                "estimate_bytes": level.estimate_bytes,
                "settled_bytes": level.settled_bytes,
                "measured_bytes": level.measured_bytes,
                "gap_bytes": level.gap_bytes,
                "left_bytes": level.left_bytes,
            }
            for level in gap.levels
        },
        "settings": [asdict(setting) for setting in gap.settings],
        "instants": [asdict(instant) for instant in gap.instants],
        "parts": [
            {
                "part": part.part,
                "terms": dict(part.terms),
                "estimate_bytes": part.estimate_bytes,
                "measured_bytes": part.measured_bytes,
                "gap_bytes": part.gap_bytes,
            }
            for part in gap.parts
        ],
        "causes": [asdict(cause) for cause in gap.causes],
    }


def request_dict(request: Request) -> dict[str, Any]:
    """The request with every default filled in, as the keyword arguments of `estimate`."""
    job, cluster = request.job, request.cluster
    return {
        "model": job.model.name,
        "arch": dict(job.model.config),
        "gpus": cluster.num_gpus,
        "gpu": cluster.gpu.sku,
        "gpus_per_node": cluster.gpus_per_node,
        "internode_gbps": cluster.internode_gbps,
        "method": [method.value for method in request.methods] or "all",
        "tp": request.tp,
        "finetune": _finetune_dict(job.finetune),
        "precision": job.precision.value,
        "optimizer": job.optimizer.value,
        "seq_len": job.seq_len,
        "micro_batch": request.micro_batch,
        "grad_accum": job.grad_accum,
        "checkpointing": job.checkpointing.value,
        "checkpoint_every": job.checkpoint_every,
        "attention": job.attention.value,
        "loss": job.loss.value,
        "offload": job.offload.value,
        "activation_offload": job.activation_offload,
        "sequence_parallel": job.sequence_parallel,
        "vocab_parallel": job.vocab_parallel,
        "fp32_reduce": job.fp32_reduce,
        "estimator": request.estimator.value,
        "runtime": request.runtime.value,
        "policy": request.policy.value,
        "solve": None if request.solve is None else request.solve.value,
        "zero": asdict(job.zero),
    }


def _lengths_dict(lengths: Lengths | None) -> dict[str, Any] | None:
    """How many sequences, and how long on average; the request's `seq_len` is the longest."""
    if lengths is None:
        return None
    return {"num_sequences": lengths.num_sequences, "mean": lengths.mean}


def _finetune_dict(finetune: Finetune) -> dict[str, Any]:
    """Options that the kind does not have are null."""
    has = FINETUNE_OPTIONS[finetune.kind]
    values = asdict(finetune)
    kind = values.pop("kind")
    return {"kind": kind, **{key: value if key in has else None for key, value in values.items()}}


def _layout_dict(layout: Layout) -> dict[str, int]:
    return {"dp": layout.dp, "tp": layout.tp, "shard": layout.shard}


def _method_dict(method: MethodReport) -> dict[str, Any]:
    return {
        "method": method.method.value,
        "layout": _layout_dict(method.layout),
        "micro_batch": method.micro_batch,
        "peak_bytes": asdict(method.peak_bytes),
        "upper_bytes": asdict(method.upper_bytes),
        "peak_instant": str(method.peak_instant),
        "ledger": {
            str(instant): {str(term): int(num_bytes) for term, num_bytes in terms.items()}
            for instant, terms in method.ledger.items()
        },
        "max_micro_batch": method.max_micro_batch,
        "tokens_per_second": method.tokens_per_second,
        "verdict": method.verdict.value,
        "expected_bytes": None if method.expected_bytes is None else asdict(method.expected_bytes),
        "host_bytes": method.host_bytes,
        "notes": list(method.notes),
    }
