"""A row as flat parameters, metrics and tags: all of it, and nothing that MLflow refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given

from src.record import Outcome, Row
from src.tracking.flat import MOST_CHARACTERS, metrics, params, tags, title
from src.units import Levels
from tests.rows import CASE, GIB, MEASURED, SIMULATED, any_row

FORMULA = {"formula": Levels(allocated=9 * GIB, reserved=12 * GIB, device=13 * GIB)}


def test_the_whole_spec_is_parameters() -> None:
    assert params(SIMULATED) == {
        "device": "simulated",
        "model.name": "tiny",
        "model.hf_id": "null",
        "model.config.model_type": "gpt2",
        "model.config.n_layer": "2",
        "method": "fsdp",
        "layout.dp": "2",
        "layout.tp": "1",
        "layout.shard": "2",
        "gpu.sku": "a100-80gb",
        "gpu.usable_gib": "79.15",
        "micro_batch": "4",
    }


def test_a_long_value_is_cut() -> None:
    case = CASE | {"model": {"config": {"layers": list(range(5000))}}}
    text = params(replace(SIMULATED, case=case))["model.config.layers"]
    assert len(text) == MOST_CHARACTERS
    assert text.endswith("…")


def test_bytes_and_errors_are_metrics() -> None:
    found = metrics(SIMULATED, FORMULA)
    assert found["allocated_bytes"] == 10 * GIB
    assert found["forward_end_allocated_bytes"] == 9 * GIB
    assert found["fill"] == pytest.approx(13 / 79.15)
    assert found["formula_allocated_error"] == pytest.approx(-0.1)
    assert found["formula_device_error"] == 0
    assert found["formula_device_bytes"] == 13 * GIB
    assert found["num_alloc_retries"] == 0
    assert found["duration_s"] == 1.5


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.OK])
def test_a_step_that_did_not_run_through_has_no_error(outcome: Outcome) -> None:
    found = metrics(replace(SIMULATED, outcome=outcome), FORMULA)
    assert "formula_device_bytes" in found
    assert not [name for name in found if name.endswith("_error")]


def test_runs_are_found_by_tags() -> None:
    found = tags(MEASURED)
    assert found["source"] == "measured"
    assert found["outcome"] == "ok"
    assert found["gpu"] == "a100-80gb"
    assert found["version.torch"] == "2.13.0"
    assert (found["case_id"], found["row_id"]) == (MEASURED.case_id, MEASURED.row_id)
    assert title(MEASURED) == "tiny fsdp dp2 seq512 batch4"


@given(any_row)
def test_whatever_a_row_holds_mlflow_takes_it(row: Row) -> None:
    numbers = metrics(row, FORMULA)
    for name in (*numbers, *params(row), *tags(row)):
        assert re.fullmatch(r"[A-Za-z0-9_\-. :/]{0,250}", name)
    assert all(math.isfinite(value) for value in numbers.values())
    for text in (*params(row).values(), *tags(row).values()):
        assert len(text) <= MOST_CHARACTERS
