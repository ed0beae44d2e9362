"""The formula against the dry run over families and settings: `python -m tests.matrix`.

Draws specs with a fixed seed until every two values have met that can, asks both estimators for the
peak of allocated bytes of each, prints the specs that are furthest apart, and writes the tables of
docs/accuracy.md and docs/coverage.md. Models are cut to a few blocks, of their full width.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from src.errors import UserError
from src.measure.dry_run import dry_run
from src.memory import Instant, estimate_step
from tests.matrix_specs import BLOCKS, SEED, Spec, draw
from tests.matrix_tables import (
    Comparison,
    difference,
    is_far,
    markdown,
    write_coverage,
    write_section,
)


def compare(spec: Spec, *, blocks: int = BLOCKS) -> Comparison:
    """Both answers.

    Raises:
        UserError: the dry run cannot simulate the model.
    """
    case = spec.case(blocks=blocks)
    found, truth = estimate_step(case.step), dry_run(case)
    reservation = truth.reservation
    assert reservation is not None
    totals = {instant.value: sum(cells.values()) for instant, cells in found.ledger.items()}
    simulated = {instant.value: peak for instant, peak in truth.instant_peaks.items()}
    step = [instant.value for instant in Instant if instant is not Instant.LOAD]
    return Comparison(
        spec=spec,
        formula_bytes=found.peak_bytes.allocated,
        dry_bytes=truth.peak_bytes,
        formula_instant=found.peak_instant.value,
        dry_instant=truth.peak_instant.value,
        formula_reserved=found.peak_bytes.reserved,
        dry_reserved=reservation.reserved_bytes,
        instants={key: (totals.get(key, 0), simulated.get(key, 0)) for key in step},
    )


def _try(spec: Spec, blocks: int) -> tuple[Comparison | None, str]:
    """Both answers, or none and the reason."""
    try:
        row = compare(spec, blocks=blocks)
    except (UserError, AssertionError) as error:
        return None, " ".join(str(error).split())[-200:]
    return row, f"{row.error:+.2%}"


def run(
    specs: Sequence[Spec], *, blocks: int = BLOCKS, workers: int | None = None
) -> tuple[list[Comparison], list[str]]:
    """Both answers to each spec, in processes of their own; and a line for each that has none."""
    rows: list[Comparison] = []
    failed: list[str] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
        answers = pool.map(_try, specs, itertools.repeat(blocks))
        for number, (spec, (row, word)) in enumerate(zip(specs, answers, strict=True), start=1):
            print(f"{number}/{len(specs)} {word} {spec}", file=sys.stderr, flush=True)
            if row is None:
                failed.append(f"{spec}: {word}")
            else:
                rows.append(row)
    return rows, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--specs", type=int, help="at most so many [all]")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of each model [{BLOCKS}]")
    parser.add_argument("--workers", type=int, help="processes [one per core]")
    parser.add_argument("--no-write", action="store_true", help="leave the docs alone")
    options = parser.parse_args(arguments)
    specs, _ = draw(options.specs, seed=options.seed)
    rows, failed = run(specs, blocks=options.blocks, workers=options.workers)
    given = "".join(
        f" --{name} {getattr(options, name)}"
        for name in ("specs", "seed", "blocks")
        if getattr(options, name) != parser.get_default(name)
    )
    command = f"python -m tests.matrix{given}"
    section = markdown(rows, command=command, blocks=options.blocks, failed=failed)
    print(section)
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        if is_far(row):
            print(difference(row))
    if not options.no_write:
        write_section(section)
        write_coverage(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
