"""Rows joined with the formula: what is unusable is refused by id, and nothing is dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from src.record import Outcome, Row, Source
from src.residual.dataset import join
from src.residual.facts import NAMES
from tests.calibration_rows import dataset_of, rows_of, step_of, steps, with_peaks

ROWS = rows_of(steps(4))
FIRST = ROWS[0]
ROWS_OF_MANY = rows_of(steps(60))


def reason_of(row: Row) -> str:
    dataset = dataset_of([row])
    assert not dataset.samples
    assert [refused.row_id for refused in dataset.refused] == [row.row_id]
    return dataset.refused[0].reason


@pytest.mark.parametrize(
    ("peaks", "reason"),
    [
        ({"allocated": -1}, "is no peak"),
        ({"allocated": 0}, "is no peak"),
        ({"allocated": float("nan")}, "no whole bytes"),
        ({"allocated": 1.5e9}, "no whole bytes"),
        ({"allocated": True}, "no whole bytes"),
        ({"allocated": FIRST.peak_bytes["device"] + 1}, "do not rise from level to level"),
        ({level: size // 2**20 for level, size in FIRST.peak_bytes.items()}, "another unit"),
        ({level: size * 1024 for level, size in FIRST.peak_bytes.items()}, "another unit"),
    ],
)
def test_impossible_peaks_are_refused(peaks: dict[str, Any], reason: str) -> None:
    if any(size != size for size in peaks.values()):  # a row with NaN has no id
        with pytest.raises(ValueError, match="Out of range"):
            dataset_of([with_peaks(FIRST, **peaks)])
        return
    assert reason in reason_of(with_peaks(FIRST, **peaks))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"outcome": Outcome.CRASHED}, "it has no peak"),
        ({"outcome": Outcome.INVALID}, "it has no peak"),
        ({"outcome": Outcome.TIMEOUT}, "it has no peak"),
        ({"peak_bytes": {}}, "states no peak"),
        ({"numbers": {"num_alloc_retries": 2}}, "no clean peak"),
    ],
)
def test_what_is_no_clean_measurement_is_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in reason_of(replace(FIRST, **change))


def test_simulated_rows_are_never_a_target() -> None:
    case = {**FIRST.case, "device": "simulated"}
    assert "never a target" in reason_of(replace(FIRST, case=case, source=Source.SIMULATED))


def test_what_the_formula_does_not_cover_is_refused_with_the_formulas_words() -> None:
    case = {**FIRST.case, "finetune": {"kind": "prefix"}, "checkpointing": "none"}
    assert "not covered by the formula: finetune" in reason_of(replace(FIRST, case=case))


def test_a_row_counts_once() -> None:
    dataset = dataset_of([*ROWS, FIRST])
    assert len(dataset.samples) == len(ROWS)
    assert [(one.row_id, one.reason) for one in dataset.refused] == [
        (FIRST.row_id, "the same row twice")
    ]


def test_every_row_is_used_or_refused() -> None:
    bad = [with_peaks(ROWS[1], allocated=-5), replace(ROWS[2], outcome=Outcome.CRASHED)]
    dataset = dataset_of([*ROWS, *bad])
    told = {sample.row_id for sample in dataset.samples}
    told |= {refused.row_id for refused in dataset.refused}
    assert told == {row.row_id for row in (*ROWS, *bad)}


def test_out_of_memory_states_no_peak_but_is_kept() -> None:
    row = replace(FIRST, outcome=Outcome.OOM, peak_bytes={"allocated": 10**9})
    dataset = dataset_of([row])
    assert dataset.is_oom.tolist() == [True]
    assert np.isnan(dataset.measured("allocated")).all()
    assert np.isnan(dataset.stated("allocated")).all()


def test_fsdp1_with_frozen_weights_is_not_compared_but_learned_from() -> None:
    some = next(
        row
        for row in rows_of(steps(60))
        if row.case["method"] == "fsdp" and row.case["finetune"]["kind"] == "lora"
    )
    row = replace(some, case={**some.case, "loop": {"fsdp1": True}})
    dataset = dataset_of([row])
    for level, size in row.peak_bytes.items():
        assert np.isnan(dataset.measured(level)).all()
        assert dataset.stated(level).tolist() == [size]
    assert "FSDP1" in dataset.refused[0].reason
    assert "FSDP1" in reason_of(replace(row, peak_bytes={"device": row.peak_bytes["device"]}))


def test_the_order_of_the_rows_changes_nothing() -> None:
    forward, backward = dataset_of(ROWS), dataset_of(ROWS[::-1])
    assert forward.samples == backward.samples
    assert forward.rows_hash == backward.rows_hash
    assert forward.rows_hash != dataset_of(ROWS[1:]).rows_hash


def test_features_are_finite_numbers_without_names() -> None:
    table = join(rows_of(steps(60)), step_of).table
    assert table.features.shape == (60, len(NAMES))
    assert np.isfinite(table.features).all()
    shares = [name for name in NAMES if name.endswith("_share")]
    parts = ("static", "logits", "activations", "gathered", "temporaries")
    total = sum(table.column(f"{part}_share") for part in parts)
    assert np.allclose(total, 1.0, atol=1e-6)
    assert {"unshared_share", "loss_block_share", "outside_share"} <= set(shares)


def test_autocast_over_half_weights_is_refused_where_it_changes_the_logits() -> None:
    some = next(row for row in ROWS_OF_MANY if row.case["model"]["config"]["model_type"] == "opt")
    loop = {"autocast_half_weights": True}
    row = replace(some, case={**some.case, "loop": loop, "loss": "standard-4x"})
    assert "turns logits to fp32" in reason_of(row)
