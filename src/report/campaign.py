"""A campaign in words: the cases that are planned, a row, and what became of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.plan.design import PlannedStep
from src.record import Outcome, Row
from src.report.listing import render_listing
from src.report.words import layout_text
from src.spec import Step
from src.units import format_gib


def step_words(step: Step) -> dict[str, str]:
    """The columns that tell a step from others of its campaign."""
    job = step.job
    return {
        "model": job.model.name,
        "method": step.method.value,
        "layout": layout_text(step.layout),
        "finetune": job.finetune.kind.value,
        "precision": job.precision.value,
        "optimizer": job.optimizer.value,
        "ckpt": job.checkpointing.value,
        "attn": job.attention.value,
        "seq": str(job.seq_len),
        "batch": str(step.micro_batch),
    }


def render_plan(
    steps: Sequence[PlannedStep], case_ids: Sequence[str], done: Collection[str]
) -> str:
    """A table of the steps, in order: what the formula expects, and which have a row already."""
    rows = [
        {
            "case": case_id,
            **step_words(planned.step),
            "GiB": f"{format_gib(planned.device_bytes, digits=1).removesuffix(' GiB')}",
            "fill": f"{planned.fill:.0%}",
            "row": "yes" if case_id in done else "-",
        }
        for planned, case_id in zip(steps, case_ids, strict=True)
    ]
    return render_listing(rows, "table")


def write_cases(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write cases as JSON lines, for `python -m src.measure.worker --run-many`.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text("".join(json.dumps(case) + "\n" for case in cases), "utf-8")
    except OSError as error:
        allowed = f"cannot be written ({error.strerror})"
        raise UserError(key="cases", value=path, allowed=allowed) from error


def row_text(row: Row) -> str:
    """One row in a line: which case, what came of it, and its bytes or its message."""
    case, layout = row.case, row.case.get("layout", {})
    degrees = "".join(f" {key}{layout[key]}" for key in ("dp", "tp") if layout.get(key, 1) > 1)
    words = f"{case['model']['name']} {case.get('method', 'single')}{degrees}"
    words += f" seq {case.get('seq_len', 512)} batch {case.get('micro_batch', 1)}: {row.outcome}"
    if row.outcome is Outcome.OK and "device" in row.peak_bytes:
        return f"{words}, {format_gib(row.peak_bytes['device'])} device ({row.source})"
    return f"{words}, {row.message.split(' GPU ', 1)[0][:160]}" if row.message else words


def render_summary(rows: Sequence[Row], *, total: int, file: Path, store: str) -> str:
    """What a campaign came to, and where it is kept: its file and its MLflow store."""
    counts = Counter(row.outcome for row in rows)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    sources = ", ".join(sorted({row.source for row in rows})) or "none"
    lines = [
        f"{len(rows)} of {total} cases have a row ({sources}): {told or 'none'}",
        f"rows: {file}",
        f"runs: {store}",
    ]
    if len(rows) < total:
        lines.append(f"{total - len(rows)} cases are left; the same command goes on with them")
    return "\n".join(lines) + "\n"
