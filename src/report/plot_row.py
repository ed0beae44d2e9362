"""The picture of a row: what was alive in each window of the step, against the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from src.measure.events import Instant, Owner
from src.record import Row
from src.report.plot_timeline import OWNER_COLORS
from src.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVEL_COLORS = {"allocated": "#0072B2", "reserved": "#E69F00"}


def draw_row(row: Row) -> Figure | None:
    """Bars over the instants: by owner if simulated, by level if measured; None without any."""
    instants = [each for each in Instant if each.value in row.instants]
    if not instants:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panel = figure.subplots()
    if row.ledger:
        _by_owner(panel, row, instants)
    else:
        _by_level(panel, row, instants)
    capacity = row.case.get("gpu", {}).get("usable_gib")
    if capacity is not None:
        panel.axhline(capacity, color="black", linestyle="--", linewidth=1, label="usable")
    names = [each.value.replace("_", " ").rsplit(" ", 1) for each in instants]
    panel.set_xticks(range(len(instants)), ["\n".join(name) for name in names], fontsize=7)
    panel.set_ylabel("GiB on the fullest GPU", fontsize=8)
    panel.tick_params(labelsize=7)
    method, name = row.case.get("method", "single"), row.case.get("model", {}).get("name", "")
    figure.suptitle(
        f"{name}, {method}, micro batch {row.case.get('micro_batch', 1)}: {row.outcome} "
        f"({row.source})",
        fontsize=10,
    )
    figure.legend(loc="outside right upper", fontsize=7, reverse=True)
    return figure


def _by_owner(panel: Axes, row: Row, instants: list[Instant]) -> None:
    bottoms = [0.0] * len(instants)
    for owner in Owner:
        sizes = [row.ledger.get(each.value, {}).get(owner.value, 0) / GIB for each in instants]
        if any(sizes):
            label = owner.value.replace("_", " ")
            color = OWNER_COLORS[owner]
            panel.bar(range(len(instants)), sizes, bottom=bottoms, label=label, color=color)
            bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]


def _by_level(panel: Axes, row: Row, instants: list[Instant]) -> None:
    for place, (level, color) in enumerate(_LEVEL_COLORS.items()):
        sizes = [row.instants[each.value].get(level, 0) / GIB for each in instants]
        at = [index + 0.4 * (place - 0.5) for index in range(len(instants))]
        panel.bar(at, sizes, width=0.4, label=level, color=color)
