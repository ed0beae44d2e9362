"""Pieces of text that several outputs share."""

from __future__ import annotations

from src.plan.result import Ledger, MethodReport, Report
from src.spec import Layout
from src.units import GIB


def gib(num_bytes: float) -> str:
    """Bytes as a bare number of GiB for a cell whose heading names the unit."""
    return f"{num_bytes / GIB:.2f}"


def layout_text(layout: Layout) -> str:
    """The degrees above 1: `dp4`, `dp2 tp2`; `shard` only where it is not all of `dp`."""
    shard = 1 if layout.shard == layout.dp else layout.shard
    degrees = {"dp": layout.dp, "tp": layout.tp, "shard": shard}
    return " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "-"


def column(ledger: Ledger, instant: str) -> dict[str, int]:
    """The terms of one instant, in bytes."""
    return dict(ledger.get(instant, {}))


def terms_by_size(method: MethodReport) -> list[str]:
    """Every term that is ever above 0, the largest of the peak's column first."""
    peak = column(method.ledger, method.peak_instant)
    largest: dict[str, int] = {}
    for terms in method.ledger.values():
        for term, num_bytes in terms.items():
            largest[term] = max(num_bytes, largest.get(term, 0))
    present = [term for term, num_bytes in largest.items() if num_bytes > 0]
    return sorted(present, key=lambda term: (-peak.get(term, 0), -largest[term], term))


def is_recommended(report: Report, method: MethodReport) -> bool:
    """Whether `method` is the one that the report recommends."""
    chosen = report.recommended
    asked = (method.method, method.layout)
    return chosen is not None and (chosen.method, chosen.layout) == asked


def shown_method(report: Report) -> MethodReport | None:
    """The method whose ledger is printed: the recommended one, else the first."""
    recommended = [method for method in report.methods if is_recommended(report, method)]
    return next(iter([*recommended, *report.methods]), None)
