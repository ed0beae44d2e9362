from __future__ import annotations

import csv
import io

from src.plan.result import Report
from src.report import render


def test_every_value_comes_back(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    assert len(rows) == len(report.methods)
    for row, method in zip(rows, report.methods, strict=True):
        assert row["method"] == method.method
        assert (int(row["dp"]), int(row["tp"]), int(row["shard"])) == (
            method.layout.dp,
            method.layout.tp,
            method.layout.shard,
        )
        for level in ("allocated", "reserved", "device"):
            assert int(row[f"peak_{level}_bytes"]) == getattr(method.peak_bytes, level)
            assert int(row[f"upper_{level}_bytes"]) == getattr(method.upper_bytes, level)
        told = {
            name.removeprefix("term_").removesuffix("_bytes"): int(value)
            for name, value in row.items()
            if name.startswith("term_") and int(value)
        }
        peak = method.ledger[method.peak_instant]
        assert told == {term: num_bytes for term, num_bytes in peak.items() if num_bytes}
        rate = row["tokens_per_second"]
        assert (float(rate) if rate else None) == method.tokens_per_second
    assert [row["recommended"] for row in rows] == ["true", "false", "false"]
