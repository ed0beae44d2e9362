"""The picture of a dry run: live bytes over the step by owner, its instants, and the capacity."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from src.measure.events import Owner
from src.plan.result import MethodReport, Report
from src.report.words import layout_text
from src.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from src.measure.timeline import Timeline

_NAME_SHARE = 0.03
"""Share of the picture that the name of an instant takes across."""
_HEADROOM = 1.35
"""Room for the names of the instants."""
_MAX_CAPACITY = 2.5
"""A capacity beyond this many times the curve is told in the legend, above the picture."""
OWNER_COLORS = {
    Owner.WEIGHTS: "#0072B2",
    Owner.GATHERED_WEIGHTS: "#56B4E9",
    Owner.CAST_WEIGHTS: "#332288",
    Owner.GRADIENTS: "#E69F00",
    Owner.OPTIMIZER_STATES: "#009E73",
    Owner.INPUTS: "#000000",
    Owner.SAVED_ACTIVATIONS: "#CC79A7",
    Owner.LOGITS: "#D55E00",
    Owner.TEMPORARIES: "#F0E442",
    Owner.COMMUNICATION_BUFFERS: "#882255",
    Owner.WORKSPACE: "#999999",
}
"""Okabe and Ito's colours, and three of Paul Tol's (personal.sron.nl/~pault)."""


def draw_timeline(report: Report, timeline: Timeline) -> Figure:
    """The figure of the report's first row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    panel = figure.subplots()
    row = report.methods[0]
    at = [moment.index for moment in timeline.moments]
    bottoms = [0.0] * len(at)
    for owner, own in _lasting_first(timeline):
        tops = [bottom + num_bytes / GIB for bottom, num_bytes in zip(bottoms, own, strict=True)]
        words = owner.value.replace("_", " ")
        panel.fill_between(
            at, bottoms, tops, step="post", label=words, color=OWNER_COLORS[owner], linewidth=0
        )
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


def _lasting_first(timeline: Timeline) -> list[tuple[Owner, list[int]]]:
    """Each owner's bytes, moment by moment; what is always there at the bottom."""
    series = [
        (owner, [moment.num_bytes[index] for moment in timeline.moments])
        for index, owner in enumerate(timeline.owners)
    ]
    return sorted(series, key=lambda pair: -min(pair[1]))


def _mark_instants(panel: Axes, timeline: Timeline) -> None:
    """A line where a window begins, and its name at the top unless another one is there."""
    last = max(timeline.moments[-1].index, 1)
    windows = [
        (instant, next(moments).index)
        for instant, moments in groupby(timeline.moments, key=lambda moment: moment.instant)
    ]
    ends = [start for _, start in windows[1:]] + [last]
    width = _NAME_SHARE * last
    free_from = 0.0
    for (instant, start), end in zip(windows, ends, strict=True):
        panel.axvline(start, color="black", linewidth=0.5, linestyle=":")
        at = min(max((start + end) / 2, free_from + width / 2), last - width / 2)
        if at - width / 2 < free_from or at > end + 2 * width:
            continue
        free_from = at + width / 2
        panel.text(
            at,
            0.985,
            "\n".join(instant.value.replace("_", " ").rsplit(" ", 1)),
            transform=panel.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="top",
            fontsize=7,
            linespacing=0.9,
        )


def _mark_capacity(panel: Axes, report: Report, row: MethodReport, highest: float) -> None:
    """The peak and the capacity as lines; a capacity far above in words only."""
    capacity = report.gpu.usable_gib
    peak = row.peak_bytes.allocated / GIB
    panel.axhline(peak, color="black", linewidth=0.8, label=f"peak {peak:.2f} GiB")
    words = f"usable {capacity:.2f} GiB"
    if capacity > _MAX_CAPACITY * highest:
        panel.plot([], [], color="none", label=f"{words} (above)")
        panel.set_ylim(0, _HEADROOM * highest)
        return
    panel.axhline(capacity, color="black", linestyle="--", linewidth=1, label=words)
    panel.set_ylim(0, _HEADROOM * max(highest, capacity))
