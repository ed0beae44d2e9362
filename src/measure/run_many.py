"""`python -m src.measure.worker --run-many`: a campaign's cases on a machine without the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.runner import TIMEOUT_S, Conditions, git_commit, run_cases, visible_gpus
from src.record import open_rows

_INTERRUPTED = 130


def run_many(arguments: Sequence[str]) -> int:
    """Run the command line; a line a row on stderr, counts of outcomes on stdout; the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        cases = read_cases(asked.run_many)
        num_gpus = 0
        if any(case.get("device") == "cuda" for case in cases):
            num_gpus = len(visible_gpus())
        conditions = Conditions(
            campaign=asked.campaign or asked.run_many.stem,
            timeout_s=asked.timeout_s,
            budget_s=asked.budget_minutes and asked.budget_minutes * 60,
            num_gpus=num_gpus,
            git_commit=git_commit(),
        )
        with open_rows(asked.rows) as file:
            for row in run_cases(cases, file, conditions):
                words = f"{row.case_id} {row.outcome}"
                print(f"{words}: {row.message}" if row.message else words, file=sys.stderr)
            counts = Counter(row.outcome.value for row in file.rows)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    print(json.dumps(counts, sort_keys=True))
    return 0


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases of a file, one JSON object a line.

    Raises:
        UserError: it cannot be read, or a line is no case.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key="cases", value=path, allowed=f"cannot be read ({error})") from error
    cases = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
            parse_case(case)
        except (UserError, json.JSONDecodeError) as error:
            raise UserError(key="cases", value=f"{path}:{number}", allowed=str(error)) from error
        cases.append(case)
    return cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m src.measure.worker",
        description="Run every case that has no row yet, each in a process of its own.",
    )
    parser.add_argument("--run-many", type=Path, required=True, metavar="CASES.jsonl")
    parser.add_argument("--rows", type=Path, required=True, metavar="ROWS.jsonl")
    parser.add_argument("--campaign", help="name of the campaign (the cases' file name)")
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help="of one case (%(default)g)"
    )
    parser.add_argument("--budget-minutes", type=float, help="of all cases together (no limit)")
    return parser
