"""Layouts as a table, and as rows that stream."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from src.plan.scale import Point
from src.report.layouts import render_points, stream_points

POINT = Point(
    method="fsdp+tp",
    dp=4,
    tp=2,
    shard=4,
    sequence_parallel=True,
    micro_batch=3,
    allocated_bytes=5 * 2**30,
    device_bytes=7 * 2**30,
    fits=True,
    step_seconds=0.25,
    tokens_per_second=12345.6,
)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_json_is_one_list(count: int) -> None:
    points = [replace(POINT, micro_batch=1 + index) for index in range(count)]
    rows = json.loads("".join(stream_points(points, "json")))
    assert [row["micro_batch"] for row in rows] == list(range(1, count + 1))
    assert all(row["tokens_per_second"] == 12345.6 for row in rows)


def test_csv_has_a_heading_and_a_line_each() -> None:
    rows = list(csv.DictReader(io.StringIO("".join(stream_points([POINT, POINT], "csv")))))
    assert len(rows) == 2
    assert rows[0]["method"] == "fsdp+tp"
    assert rows[0]["device_bytes"] == str(7 * 2**30)


def test_rows_come_one_by_one() -> None:
    def endless():
        while True:
            yield POINT

    pieces = stream_points(endless(), "json")
    assert len([next(pieces) for _ in range(5)]) == 5


def test_the_table_names_what_counts() -> None:
    text = render_points([POINT], heading="what it is of")
    assert text.startswith("what it is of\n")
    assert "fsdp+tp" in text
    assert "7.00 GiB" in text
    assert "12,346" in text
    assert render_points([], heading="x").endswith("Nothing fits.\n")
