"""The formula against the dry run, on the first specs of the matrix and some plain ones."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from src.memory import Instant
from src.spec import Method
from tests.matrix import run
from tests.matrix_specs import AXES, DEFAULTS, MODELS, Spec, draw, every_pair, is_possible
from tests.matrix_tables import (
    BEGIN,
    END,
    Comparison,
    coverage,
    markdown,
    percentile,
    write_section,
)

PLAIN = [
    Spec(model=model, setting=DEFAULTS | {"optimizer": "adamw-fused", "shape": "4 x 512"} | changes)
    for model, changes in (
        ("opt-1.3b", {}),
        ("opt-1.3b", {"method": "ddp", "checkpointing": "none"}),
        ("llama-3.2-1b", {"method": "fsdp"}),
        ("llama-3.2-1b", {"finetune": "lora", "precision": "bf16-true"}),
        ("gpt2-medium", {"precision": "fp32", "checkpointing": "none", "optimizer": "sgd"}),
        ("pythia-410m", {"method": "tp", "optimizer": "sgd-momentum"}),
        ("bloom-560m", {"attention": "eager", "grad_accum": "2"}),
        ("qwen2.5-1.5b", {"method": "fsdp-grad", "attention": "flash", "optimizer": "adamw"}),
        ("mistral-7b-v0.1", {"precision": "bf16-true", "optimizer": "adamw"}),
        ("gemma-2b", {"method": "ddp", "finetune": "lora", "gpu": "h100-80gb"}),
        ("starcoder2-3b", {"gpu": "v100-32gb", "precision": "fp16-mixed"}),
        ("opt-350m", {"method": "fsdp+tp", "precision": "bf16-true"}),
    )
]
DRAWN = 28


@pytest.fixture(scope="module")
def rows() -> list[Comparison]:
    specs = [*PLAIN, *draw(DRAWN)[0]]
    assert all(is_possible(spec) for spec in specs)
    found, failed = run(specs)
    assert not failed
    return found


def test_the_peaks_agree(rows: list[Comparison]) -> None:
    errors = {str(row.spec): abs(row.error) for row in rows}
    assert len(errors) >= 40
    assert statistics.median(errors.values()) <= 0.005, errors
    assert percentile(list(errors.values()), 0.95) <= 0.02, errors
    assert max(errors.values()) <= 0.05, errors


def test_the_peaks_are_at_the_same_instant(rows: list[Comparison]) -> None:
    """Two instants that are nearly equally large may change places."""
    for row in rows:
        if not row.same_instant and row.formula_instant in row.instants:
            mine, dry = row.instants[row.formula_instant]
            assert dry >= 0.98 * row.dry_bytes, (row.spec, mine, dry)


def test_the_tables_count_every_row(rows: list[Comparison]) -> None:
    text = markdown(rows, command="python -m tests.matrix", blocks=4)
    assert f"{len(rows)} specs over" in text
    for axis in ("method", "precision"):
        table = text.split(f"| {axis} | specs |", 1)[1].split("\n\n", 1)[0]
        counts = [int(line.split("|")[2]) for line in table.splitlines()[2:]]
        assert sum(counts) == len(rows)


def test_specs_are_the_same_every_time_and_bring_new_pairs() -> None:
    specs, given_up = draw(12)
    assert (specs, given_up) == draw(12)
    seen = set()
    for spec in specs:
        assert spec.pairs() - seen
        seen |= spec.pairs()
    assert seen <= every_pair()
    assert not seen & given_up
    assert {spec.model for spec in specs} <= set(MODELS)


def test_every_method_has_a_cell_for_every_value(rows: list[Comparison]) -> None:
    text = coverage(rows)
    for axis in set(AXES) - {"method", "gpu", "shape"}:
        table = text.split(f"## {axis}\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
        assert len(table) == 2 + len(AXES[axis])
        assert all(line.count("|") == len(Method) + 2 for line in table)
    marks = {
        cell.split()[0]
        for line in text.splitlines()
        if line.startswith("| ")
        for cell in line.split(" | ")[1:]
    }
    assert {"checked", "derived", "impossible"} <= marks


def test_every_instant_of_a_step_is_compared(rows: list[Comparison]) -> None:
    assert set(rows[0].instants) == {instant.value for instant in Instant} - {"load"}


def test_a_section_is_replaced_in_its_page(tmp_path: Any) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text("# Title\n\nbefore\n", "utf-8")
    write_section("first\n", page)
    page.write_text(page.read_text("utf-8") + "after\n", "utf-8")
    write_section("second\n", page)
    assert page.read_text("utf-8") == f"# Title\n\nbefore\n\n{BEGIN}\nsecond\n{END}\nafter\n"
