"""The picture of a dry run: live bytes over the step by owner, its instants, and the capacity."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from src.plan.result import MethodReport, Report
from src.report.plot import style
from src.report.words import layout_text
from src.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from src.measure.timeline import Timeline

_LEAST_NAMED_SHARE = 0.025
"""An instant narrower than this share of the picture gets a line and no name."""
_HEADROOM = 1.3
"""The capacity is drawn to scale where that leaves the curve most of the picture."""


def draw_timeline(report: Report, timeline: Timeline) -> Figure:
    """The figure of the report's first row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    panel = figure.subplots()
    row = report.methods[0]
    at = [moment.index for moment in timeline.moments]
    heights = [
        [moment.num_bytes[index] / GIB for moment in timeline.moments]
        for index in range(len(timeline.owners))
    ]
    bottoms = [0.0] * len(at)
    for index, (owner, own) in enumerate(zip(timeline.owners, heights, strict=True)):
        tops = [bottom + height for bottom, height in zip(bottoms, own, strict=True)]
        words = owner.value.replace("_", " ")
        panel.fill_between(at, bottoms, tops, step="post", label=words, **style(index))
        bottoms = tops
    _mark_instants(panel, timeline)
    _mark_capacity(panel, report, row, max(bottoms))
    panel.set_xlim(0, max(at[-1], 1))
    panel.set_xlabel("allocations and frees of the second optimizer step, in order", fontsize=8)
    panel.set_ylabel("live GiB per GPU (allocated)", fontsize=8)
    panel.tick_params(labelsize=7)
    layout = layout_text(row.layout)
    where = "" if layout == "-" else f" {layout}"
    figure.suptitle(
        f"{report.model.name} on {report.request.cluster.num_gpus} x {report.gpu.sku}, {row.method}"
        f"{where}, micro batch {row.micro_batch}: {row.verdict} (simulated)",
        fontsize=10,
    )
    figure.legend(loc="outside right upper", fontsize=7, reverse=True)
    return figure


def _mark_instants(panel: Axes, timeline: Timeline) -> None:
    """A line where a window begins, and its name at the top."""
    last = max(timeline.moments[-1].index, 1)
    windows = [
        (instant, next(moments).index)
        for instant, moments in groupby(timeline.moments, key=lambda moment: moment.instant)
    ]
    ends = [start for _, start in windows[1:]] + [last]
    for (instant, start), end in zip(windows, ends, strict=True):
        panel.axvline(start, color="black", linewidth=0.5, linestyle=":")
        if end - start >= _LEAST_NAMED_SHARE * last:
            panel.text(
                (start + end) / 2,
                0.98,
                instant.replace("_", " "),
                transform=panel.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="top",
                fontsize=7,
            )


def _mark_capacity(panel: Axes, report: Report, row: MethodReport, highest: float) -> None:
    """The capacity as a line; where it is far above, its value in words instead."""
    capacity = report.gpu.usable_gib
    peak = row.peak_bytes.allocated / GIB
    panel.axhline(peak, color="black", linewidth=0.8, label=f"peak {peak:.2f} GiB")
    panel.axhline(
        capacity, color="black", linestyle="--", linewidth=1, label=f"usable {capacity:.2f} GiB"
    )
    panel.set_ylim(0, _HEADROOM * max(highest, capacity))
