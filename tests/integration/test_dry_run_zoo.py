"""Every model of the zoo, dry-run once with the transformers that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from src.measure.case import parse_case
from src.measure.dry_run import dry_run

ZOO = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
UNSUPPORTED: dict[str, str] = {}
"""Models that the dry run cannot run -> the cause, as its one line has it."""


@pytest.mark.slow
@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    entry: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = entry["config"]
    case = {
        "model": {"name": path.stem, "config": config},
        "seq_len": 256,
        "precision": "bf16-true",
    }
    if path.stem in UNSUPPORTED:
        pytest.xfail(UNSUPPORTED[path.stem])
    result = dry_run(parse_case(case))
    assert result.peak_bytes > result.after_step_bytes > 0
    assert result.num_parameters == entry.get("num_parameters", result.num_parameters)
