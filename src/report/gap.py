"""The gap to what was measured, for people: levels, settings, instants, parts, causes."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from src.plan.gap.result import Gap, Kind
from src.report.words import gib, layout_text
from src.units import GIB

NONE = "-"
SETTINGS_HEADING = "Settings that differ, and what each moves alone (GiB)"
LEVELS_HEADING = "Gap = measured - estimate, GiB per GPU"

Cells = list[str]


def signed(num_bytes: int | None) -> str:
    """Bytes as GiB with a sign; a dash for None."""
    # Adding 0.0 takes the sign off a zero.
    return NONE if num_bytes is None else f"{round(num_bytes / GIB, 3) + 0.0:+.3f}"


def _plain(num_bytes: int | None) -> str:
    return NONE if num_bytes is None else gib(num_bytes)


def gap_title(gap: Gap) -> str:
    """What is held against what."""
    what = f"row {gap.id}" if gap.kind is Kind.ROW else f"snapshot, GPU {gap.id}"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(gap.versions.items()))
    return (
        f"Why off: {gap.file} ({what}, {gap.source}, {gap.outcome}"
        f"{f'; {versions}' if versions else ''}) against {gap.method} "
        f"({layout_text(gap.layout)}, micro batch {gap.micro_batch})"
    )


def level_rows(gap: Gap) -> tuple[Cells, list[Cells]]:
    """Headings and cells of the levels."""
    headings = ["level", "estimate", "measured", "gap", "with its settings", "left"]
    return headings, [
        [
            level.level,
            _plain(level.estimate_bytes),
            _plain(level.measured_bytes),
            signed(level.gap_bytes),
            _plain(level.settled_bytes),
            signed(level.left_bytes),
        ]
        for level in gap.levels
    ]


def setting_rows(gap: Gap) -> tuple[Cells, list[Cells]]:
    """Headings and cells of the settings that differ."""
    rows = []
    for setting in gap.settings:
        moved = setting.moved_bytes
        sizes = (None, None) if moved is None else (moved.allocated, moved.device)
        rows.append([setting.key, setting.asked, setting.measured, *map(signed, sizes)])
    return ["setting", "asked", "measured", "allocated", "device"], rows


def instant_rows(gap: Gap) -> tuple[Cells, list[Cells]]:
    """Headings and cells of the instants."""
    rows = []
    for one in gap.instants:
        both = one.estimate_bytes is not None and one.measured_bytes is not None
        left = (one.measured_bytes or 0) - (one.estimate_bytes or 0) if both else None
        cells = [one.instant, _plain(one.estimate_bytes), _plain(one.measured_bytes), signed(left)]
        rows.append(cells)
    return ["instant", "estimate", "measured", "gap"], rows


def part_rows(gap: Gap) -> tuple[Cells, list[Cells]]:
    """Headings and cells of the parts; what belongs to none comes last."""
    rows = [
        [
            part.part,
            gib(part.estimate_bytes),
            _plain(part.measured_bytes),
            signed(part.gap_bytes),
            ", ".join(f"{term} {gib(size)}" for term, size in part.terms.items()),
        ]
        for part in gap.parts
    ]
    if gap.unattributed_bytes is not None:
        left = gap.unattributed_bytes
        rows.append(["unattributed", gib(0), gib(left), signed(left), ""])
    return ["part", "estimate", "measured", "gap", "terms of the estimate"], rows


def cause_lines(gap: Gap) -> list[str]:
    """What settings do not explain, a line each."""
    return [
        f"{cause.kind}: {cause.words}"
        if cause.gap_bytes is None
        else f"{cause.kind} {signed(cause.gap_bytes)} GiB: {cause.words}"
        for cause in gap.causes
    ]


def sections(gap: Gap) -> list[tuple[str, tuple[Cells, list[Cells]]]]:
    """Headings and tables, without the empty ones."""
    found = [
        (LEVELS_HEADING, level_rows(gap)),
        (SETTINGS_HEADING, setting_rows(gap)),
        ("Allocated GiB by instant, with its settings", instant_rows(gap)),
        (f"Allocated GiB at {gap.instant}, with its settings", part_rows(gap)),
    ]
    return [(heading, table) for heading, table in found if table[1]]


def print_gap(
    gap: Gap,
    console: Console,
    say: Callable[..., None],
    new_table: Callable[[], Table],
) -> None:
    """Print the whole of it."""
    say(console, "", gap_title(gap))
    for heading, (headings, rows) in sections(gap):
        say(console, "", heading)
        table = new_table()
        for place, name in enumerate(headings):
            is_words = not place or name in ("asked", "terms of the estimate")
            is_words = is_words or (name == "measured" and heading == SETTINGS_HEADING)
            table.add_column(
                name,
                justify="left" if is_words else "right",
                overflow="fold",
                no_wrap=not is_words,
            )
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    if gap.kind is Kind.ROW and not gap.settings:
        say(console, "", "No setting differs")
    say(console, "", "What settings do not explain", *(f"- {line}" for line in cause_lines(gap)))
