"""The answer as CSV: one line per method and layout, every value in a column of its own."""

from __future__ import annotations

import csv
import io

from src.plan.result import MethodReport, Report
from src.report.words import column, is_recommended, terms_by_size

_LEVELS = ("allocated", "reserved", "device")


def render_csv(report: Report) -> str:
    """A heading and one line per method and layout; bytes per GPU, the peak's terms last."""
    terms = list(dict.fromkeys(t for method in report.methods for t in terms_by_size(method)))
    rows = [_row(report, method, terms) for method in report.methods]
    stream = io.StringIO()
    if rows:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return stream.getvalue()


def _row(report: Report, method: MethodReport, terms: list[str]) -> dict[str, object]:
    peak = column(method.ledger, method.peak_instant)
    return {
        "model": report.model.name,
        "gpu": report.gpu.sku,
        "gpus": report.request.cluster.num_gpus,
        "method": method.method.value,
        "dp": method.layout.dp,
        "tp": method.layout.tp,
        "shard": method.layout.shard,
        "micro_batch": method.micro_batch,
        **{f"peak_{level}_bytes": getattr(method.peak_bytes, level) for level in _LEVELS},
        **{f"upper_{level}_bytes": getattr(method.upper_bytes, level) for level in _LEVELS},
        "usable_bytes": report.gpu.usable_bytes,
        "peak_instant": method.peak_instant,
        "max_micro_batch": method.max_micro_batch,
        "tokens_per_second": method.tokens_per_second,
        "verdict": method.verdict.value,
        "expected_device_bytes": None
        if method.expected_bytes is None
        else method.expected_bytes.device,
        "host_bytes": method.host_bytes,
        "recommended": str(is_recommended(report, method)).lower(),
        "notes": "; ".join(method.notes),
        **{f"term_{term}_bytes": peak.get(term, 0) for term in terms},
    }
