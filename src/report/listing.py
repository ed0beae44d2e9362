"""What `list=` found, as text, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence


def render_listing(rows: Sequence[dict[str, str]], form: str) -> str:
    """Rows with equal keys as aligned text (`table`), `json` or `csv`."""
    assert rows
    if form == "json":
        return json.dumps(list(rows), indent=2) + "\n"
    if form == "csv":
        stream = io.StringIO()
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    heading = "  ".join(name.ljust(width) for name, width in widths.items())
    body = ["  ".join(row[name].ljust(width) for name, width in widths.items()) for row in rows]
    return "".join(f"{line.rstrip()}\n" for line in (heading, *body))
