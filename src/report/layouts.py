"""Layouts of a cluster as text: a table, or rows streamed as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields

from src.plan.scale import Point
from src.spec import Request
from src.units import format_gib

_HEADER = (
    "method",
    "dp",
    "tp",
    "shard",
    "seq. split",
    "micro batch",
    "device",
    "step s",
    "tokens/s",
)
TOLD_GAIN = 0.01
"""Rows of the table are at least so much faster than the one before."""

_NAMES = [field.name for field in fields(Point)]


def stream_points(points: Iterable[Point], form: str) -> Iterator[str]:
    """Rows as `csv` or `json`, piece by piece: nothing is kept."""
    if form == "csv":
        yield ",".join(_NAMES) + "\n"
        for point in points:
            stream = io.StringIO()
            csv.writer(stream, lineterminator="\n").writerow(asdict(point).values())
            yield stream.getvalue()
        return
    start = "[\n"
    for point in points:
        yield start + json.dumps(asdict(point))
        start = ",\n"
    yield "[]\n" if start == "[\n" else "\n]\n"


def layouts_heading(request: Request) -> str:
    """What the rows are of, and what they are not."""
    cluster = request.cluster
    nodes = f"{cluster.num_nodes} nodes of " if cluster.num_nodes > 1 else ""
    return (
        f"{request.job.model.name} on {nodes}{cluster.node_size} x {cluster.gpu.sku}, "
        f"seq_len={request.job.seq_len}: what no other layout beats in both memory and speed\n"
        "(batch is the micro batch; device is the formula's allocated bytes, context and NCCL,\n"
        "without pools of further streams; tokens/s only ranks; method=, tp= and micro_batch=\n"
        "give the full answer for one)"
    )


def render_points(points: Sequence[Point], *, heading: str) -> str:
    """The table of what nothing beats, without what is hardly faster than the row before it."""
    if not points:
        return f"{heading}\n\nNothing fits.\n"
    told: list[Point] = []
    for point in points:
        if not told or point.tokens_per_second >= told[-1].tokens_per_second * (1 + TOLD_GAIN):
            told.append(point)
    rows = [_HEADER, *map(_cells, told)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    text = [heading, "", lines[0], "-" * len(lines[0]), *lines[1:]]
    if len(told) < len(points):
        text += ["", f"{len(points) - len(told)} more are less than {TOLD_GAIN:.0%} faster each; "]
        text[-1] += "format=csv or json has them"
    return "\n".join(text) + "\n"


def _cells(point: Point) -> tuple[str, ...]:
    return (
        point.method,
        str(point.dp),
        str(point.tp),
        str(point.shard),
        "yes" if point.sequence_parallel else "",
        str(point.micro_batch),
        format_gib(point.device_bytes),
        f"{point.step_seconds:.3g}",
        f"{point.tokens_per_second:,.0f}",
    )
