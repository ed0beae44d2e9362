"""The table of an open field: what was found for it, per method or per GPU model."""

from __future__ import annotations

from rich.table import Table

from src.plan.result import Report, Solution, Solved
from src.report.words import gib, layout_text
from src.spec import Unknown

_HEADINGS = {
    Unknown.MICRO_BATCH: "largest micro batch",
    Unknown.SEQ_LEN: "longest sequence",
    Unknown.LORA_R: "largest rank of LoRA",
    Unknown.GPUS: "fewest GPUs",
    Unknown.GPU: "fewest GPUs of each kind",
}


def solved_heading(report: Report) -> list[str]:
    """What was left open, and that what follows is at its best value."""
    solved = report.solved
    assert solved is not None
    heading = f"solve={solved.key}: the {_HEADINGS[solved.key]} with which the job fits"
    if solved.best is None:
        return [f"{heading}: none; below is the request as it stands", ""]
    return [f"{heading}; below the first of these", ""]


def solved_table(solved: Solved, table: Table) -> Table:
    """Fill a table; methods that fit at no value are left to one line at its end."""
    fitting = [found for found in solved.solutions if found.value is not None]
    first = "gpu" if solved.key is Unknown.GPU else "method"
    table.add_column(first, no_wrap=True)
    if solved.key is Unknown.GPU:
        table.add_column("method", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_column(solved.key.value, justify="right", no_wrap=True)
    table.add_column("upper\nGiB", justify="right", no_wrap=True)
    for found in fitting:
        table.add_row(*_cells(solved, found))
    rest = [found for found in solved.solutions if found.value is None]
    if rest:
        names = dict.fromkeys(
            found.gpu if solved.key is Unknown.GPU else found.method.value for found in rest
        )
        filler = [""] * (len(table.columns) - 1)
        for name in names:
            table.add_row(name, *filler[:-1], "none")
    return table


def _cells(solved: Solved, found: Solution) -> list[str]:
    assert found.value is not None
    assert found.upper_bytes is not None
    value = f"{found.value:,}{' or more' if found.is_limit else ''}"
    if solved.key is Unknown.GPU:
        value = str(found.num_gpus)
    names = [found.gpu, found.method.value] if solved.key is Unknown.GPU else [found.method.value]
    return [*names, layout_text(found.layout), value, gib(found.upper_bytes)]
