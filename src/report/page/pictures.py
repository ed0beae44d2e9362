"""The page's pictures as inline SVG; each part tells its numbers when pointed at."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from src.plan.result import MethodReport, Report
from src.report.words import column, gib, layout_text, terms_by_size
from src.units import GIB

if TYPE_CHECKING:
    from src.measure.timeline import Timeline

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 46
GOLDEN_ANGLE = 137.508


def color(place: int) -> str:
    """The colour of the part at a place: hues a golden angle apart, so that none comes twice."""
    lightness = (45, 58, 36)[place // 8 % 3]
    return f"hsl({place * GOLDEN_ANGLE % 360:.0f} 62% {lightness}%)"


def _plot(content: str, *, label: str) -> str:
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(label)}'>"
        f"{content}</svg>"
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f"<li><i style='background:{color(place)}'></i>{html.escape(name)}</li>"
        for place, name in enumerate(names)
    )
    return f"<ul class='legend'>{items}</ul>"


class _Scale:
    """Bytes to the picture's height, with its axis."""

    def __init__(self, most: float) -> None:
        self._most = max(most, 1.0) * 1.05

    def y(self, num_bytes: float) -> float:
        return HEIGHT - BOTTOM - num_bytes / self._most * (HEIGHT - TOP - BOTTOM)

    def axis(self) -> str:
        step = _round_step(self._most / GIB / 4)
        marks = []
        value = 0.0
        while value * GIB <= self._most:
            y = self.y(value * GIB)
            marks.append(
                f"<line class='axis' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
                f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{value:g}</text>"
            )
            value += step
        return "".join(marks) + f"<text x='4' y='{TOP - 2}'>GiB</text>"


def _round_step(least: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next((power * factor for factor in (1, 2, 5) if power * factor >= least), power * 10)


def ledger_picture(shown: MethodReport, *, usable_bytes: int) -> str:
    """The ledger as stacked bars, one per instant, and the card's capacity."""
    terms, instants = terms_by_size(shown), list(shown.ledger)
    totals = [sum(column(shown.ledger, instant).values()) for instant in instants]
    scale = _Scale(max([*totals, usable_bytes if max(totals) > usable_bytes / 3 else 0]))
    width = (WIDTH - LEFT - RIGHT) / len(instants)
    parts = [scale.axis()]
    for place, instant in enumerate(instants):
        cells, base, x = column(shown.ledger, instant), 0, LEFT + place * width + width * 0.15
        for index, term in enumerate(terms):
            size = cells.get(term, 0)
            if size:
                top, bottom = scale.y(base + size), scale.y(base)
                tip = html.escape(f"{instant}: {term} {gib(size)} GiB")
                parts.append(
                    f"<rect class='part' x='{x:.1f}' y='{top:.1f}' width='{width * 0.7:.1f}' "
                    f"height='{bottom - top:.2f}' fill='{color(index)}'><title>{tip}</title></rect>"
                )
                base += size
        parts.append(_instant_label(instant, LEFT + (place + 0.5) * width, shown.peak_instant))
    if max(totals) > usable_bytes / 3:
        parts.append(_capacity(scale, usable_bytes))
    return _plot("".join(parts), label="bytes by term at each instant") + _legend(terms)


def _instant_label(instant: str, x: float, peak: str) -> str:
    words = instant.split("_")
    half = (len(words) + 1) // 2
    lines = [" ".join(words[:half]), " ".join(words[half:])]
    weight = " font-weight='700'" if instant == peak else ""
    return "".join(
        f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 16 + 14 * number}' text-anchor='middle'{weight}>"
        f"{html.escape(line)}</text>"
        for number, line in enumerate(lines)
        if line
    )


def _capacity(scale: _Scale, usable_bytes: int) -> str:
    y = scale.y(usable_bytes)
    return (
        f"<line class='card' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        f"<text x='{WIDTH - RIGHT}' y='{y - 4:.1f}' text-anchor='end'>the card</text>"
    )


def pareto_picture(report: Report) -> str:
    """Upper bound against throughput: up is more memory, right is faster."""
    rows = [row for row in report.methods if row.tokens_per_second is not None]
    if not rows:
        return "<p>How fast the methods are is not known.</p>"
    most = max(row.upper_bytes.device for row in rows)
    scale = _Scale(max(most, report.gpu.usable_bytes))
    fastest = max(row.tokens_per_second or 0.0 for row in rows)
    parts = [scale.axis(), _capacity(scale, report.gpu.usable_bytes)]
    for place, row in enumerate(rows):
        rate = row.tokens_per_second or 0.0
        x = LEFT + rate / fastest * (WIDTH - LEFT - RIGHT) * 0.94
        y = scale.y(row.upper_bytes.device)
        words = (
            f"{row.method} {layout_text(row.layout)} micro batch {row.micro_batch}: upper bound "
        )
        words += f"{gib(row.upper_bytes.device)} GiB, {rate:,.0f} tokens/s"
        parts.append(
            f"<circle class='dot' cx='{x:.1f}' cy='{y:.1f}' r='7' fill='{color(place)}'>"
            f"<title>{html.escape(words)}</title></circle>"
        )
    parts.append(
        f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 8}' text-anchor='end'>tokens/s, up to "
        f"{fastest:,.0f}</text>"
    )
    names = [f"{row.method} {layout_text(row.layout)}" for row in rows]
    return _plot("".join(parts), label="memory against throughput") + _legend(names)


def timeline_picture(timeline: Timeline) -> str:
    """Live bytes by owner over one step."""
    moments = timeline.moments
    scale = _Scale(max(sum(moment.num_bytes) for moment in moments))
    last = max(moment.index for moment in moments) or 1
    xs = [LEFT + moment.index / last * (WIDTH - LEFT - RIGHT) for moment in moments]
    parts, below = [scale.axis()], [0] * len(moments)
    for place, owner in enumerate(timeline.owners):
        above = [base + m.num_bytes[place] for base, m in zip(below, moments, strict=True)]
        if above == below:
            continue
        edge = [f"{x:.1f},{scale.y(v):.1f}" for x, v in zip(xs, above, strict=True)]
        back = [f"{x:.1f},{scale.y(v):.1f}" for x, v in zip(xs, below, strict=True)]
        parts.append(
            f"<polygon class='part' points='{' '.join([*edge, *reversed(back)])}' "
            f"fill='{color(place)}'><title>{html.escape(owner.value)}</title></polygon>"
        )
        below = above
    names = [owner.value for owner in timeline.owners]
    return _plot("".join(parts), label="live bytes by owner over the step") + _legend(names)
