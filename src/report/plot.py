"""The picture: the ledger of every method as stacked bars per instant, and the card's capacity."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import UserError
from src.plan.result import MethodReport, Report
from src.report.words import column, layout_text, terms_by_size
from src.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
)
"""Okabe and Ito's colours (jfly.uni-koeln.de/color), which colour-blind readers tell apart."""
_HATCHES = ("", "///", "...", "xxx")
_MAX_COLUMNS = 4
_MAX_CARDS = 2.5
"""Peaks beyond this many times the capacity are cut off, so that the others stay readable."""


def write_figure(make: Callable[[], Figure], path: Path) -> None:
    """Draw the figure that `make` makes into `path`; its suffix (.png, .svg, .pdf) is the format.

    The file appears at once or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    import matplotlib

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    form = path.suffix.casefold().removeprefix(".")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "peakcast", "hatch.linewidth": 0.4}
    try:
        with matplotlib.rc_context(settings):
            make().savefig(temporary, format=form, dpi=150, metadata=metadata)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            key="plot", value=path, allowed=f"cannot be written ({error.strerror or error})"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def draw(report: Report) -> Figure:
    """The figure: one panel per method and layout, all with the same scale."""
    from matplotlib.figure import Figure

    methods = report.methods
    terms = _terms_by_persistence(methods)
    num_columns = max(1, min(_MAX_COLUMNS, len(methods)))
    num_rows = max(1, math.ceil(len(methods) / num_columns))
    legend_inches = 0.25 * math.ceil((len(terms) + 2) / num_columns) + 0.3
    size = (max(6.5, 3.2 * num_columns), 3.4 * num_rows + legend_inches)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flat)
    instants = list(dict.fromkeys(instant for method in methods for instant in method.ledger))
    for index, (panel, method) in enumerate(zip(panels, methods, strict=False)):
        _draw_ledger(panel, method, terms, instants)
        _draw_levels(panel, method, instants, report.gpu.usable_gib)
        is_lowest = index + num_columns >= len(methods)
        _label(panel, method, instants if is_lowest else [""] * len(instants))
    for unused in panels[len(methods) :]:
        unused.set_visible(False)
    _scale(panels[: len(methods)], report)
    _finish(figure, report, num_columns)
    return figure


def _terms_by_persistence(methods: Sequence[MethodReport]) -> list[str]:
    """Every term that is ever above 0; what is there at most instants comes first."""
    terms = dict.fromkeys(term for method in methods for term in terms_by_size(method))
    columns = [terms for method in methods for terms in method.ledger.values()]
    present = {term: sum(column.get(term, 0) > 0 for column in columns) for term in terms}
    return sorted(terms, key=lambda term: -present[term])


def _style(index: int) -> dict[str, Any]:
    hatch = _HATCHES[index // len(_COLORS) % len(_HATCHES)]
    color = _COLORS[index % len(_COLORS)]
    return {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}


def _draw_ledger(panel: Axes, method: MethodReport, terms: list[str], instants: list[str]) -> None:
    bottoms = [0.0] * len(instants)
    for index, term in enumerate(terms):
        heights = [column(method.ledger, instant).get(term, 0) / GIB for instant in instants]
        panel.bar(range(len(instants)), heights, bottom=bottoms, label=term, **_style(index))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _draw_levels(panel: Axes, method: MethodReport, instants: list[str], usable_gib: float) -> None:
    panel.axhline(usable_gib, color="black", linestyle="--", linewidth=1, label="usable capacity")
    if method.peak_instant not in instants:
        return
    device, upper = method.peak_bytes.device / GIB, method.upper_bytes.device / GIB
    panel.errorbar(
        [instants.index(method.peak_instant)],
        [device],
        yerr=[[0.0], [max(upper - device, 0.0)]],
        color="black",
        marker="o",
        markersize=3,
        capsize=3,
        linestyle="none",
        label="device level, up to its upper bound",
    )


def _label(panel: Axes, method: MethodReport, instants: list[str]) -> None:
    words = [instant.replace("_", " ") for instant in instants]
    panel.set_xticks(range(len(words)), words, rotation=60, ha="right", rotation_mode="anchor")
    layout = layout_text(method.layout)
    where = "" if layout == "-" else f" {layout}"
    title = f"{method.method}{where}, micro batch {method.micro_batch}: {method.verdict}"
    panel.set_title(title, fontsize=8)
    panel.tick_params(labelsize=7)


def _scale(panels: list[Axes], report: Report) -> None:
    """One scale for all; a peak far beyond the card is cut off and told as a number."""
    peaks = [method.upper_bytes.device / GIB for method in report.methods]
    capacity = report.gpu.usable_gib
    top = min(max([*peaks, capacity]), _MAX_CARDS * capacity)
    for panel, peak in zip(panels, peaks, strict=True):
        panel.set_ylim(0, 1.08 * top)
        if peak > top:
            panel.text(
                0.02, 0.97, f"{peak:,.0f} GiB", transform=panel.transAxes, va="top", fontsize=8
            )


def _finish(figure: Figure, report: Report, num_columns: int) -> None:
    cluster = report.request.cluster
    figure.suptitle(f"{report.model.name} on {cluster.num_gpus} x {report.gpu.sku}", fontsize=10)
    figure.supylabel("GiB per GPU (bars: allocated)", fontsize=8)
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        found, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=num_columns,
            fontsize=7,
        )
