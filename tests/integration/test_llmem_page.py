"""LLMem's formulas beside what LLMem published, and the page that says so."""

from __future__ import annotations

import pytest

from tests import llmem_times
from tests.llmem_table import (
    BEGIN,
    BOARD_MIB,
    CARD,
    DRIVER_MIB,
    END,
    PAGE,
    SECONDS,
    SINGLE,
    chosen,
    decision,
    fits,
    nearest_fit,
    quickest,
    tables,
    wrong_outcomes,
)


def test_the_tables_are_current() -> None:
    body = PAGE.read_text("utf-8").split(BEGIN, 1)[1].split(END, 1)[0]
    assert body.strip() == tables(), "run python -m tests.llmem_table"


def test_the_driver_keeps_what_is_between_board_and_card() -> None:
    assert CARD.usable_bytes / 2**20 + DRIVER_MIB == pytest.approx(BOARD_MIB, abs=0.5)


@pytest.mark.parametrize("name", SINGLE)
def test_one_gpu_is_near_llmems_own_estimate(name: str) -> None:
    figure, truth = SINGLE[name]
    fit = nearest_fit(name, figure)
    assert abs(fit.ours - figure) <= fit.per_sequence / 2
    assert abs(fit.ours - truth) / truth < 0.02


def test_three_of_four_are_nearer_than_chance() -> None:
    off = {name: nearest_fit(name, figure).ours - figure for name, (figure, _) in SINGLE.items()}
    assert sorted(name for name, distance in off.items() if abs(distance) < 60) == [
        "codegen-350m",
        "opt-125m",
        "opt-350m",
    ]
    assert all(distance < 0 for distance in off.values())


def test_no_run_that_worked_is_called_out_of_memory() -> None:
    wrong = wrong_outcomes()
    ran = {
        (name, method)
        for name, times in SECONDS.items()
        for method, seconds in zip(("fsdp", "fsdp+tp", "tp"), times, strict=True)
        if seconds is not None
    }
    assert not ran & set(wrong)
    assert len(wrong) <= 3


@pytest.mark.parametrize("name", SECONDS)
def test_cdp_fits_none_of_the_nine(name: str) -> None:
    assert not fits(name, "ddp")


@pytest.mark.parametrize("name", sorted(set(SECONDS) - {"opt-2.7b", "codegen-2b"}))
def test_the_decision_is_what_was_fastest(name: str) -> None:
    assert chosen(decision(name)) == quickest(name)


def test_llama_7b_is_left_to_cpu_offload() -> None:
    report = decision("llama-7b")
    assert report.recommended is None
    assert any("LLMem falls back on CPU offload" in line for line in report.warnings)


def test_the_times_are_current() -> None:
    body = PAGE.read_text("utf-8").split(llmem_times.BEGIN, 1)[1].split(llmem_times.END, 1)[0]
    assert body.strip() == llmem_times.table(), "run python -m tests.llmem_times"


def test_modelled_times_are_in_the_measured_order() -> None:
    agreed = [name for name in SECONDS if llmem_times.order_agrees(name)]
    assert len(agreed) >= 8, agreed


def test_the_fastest_that_fits_is_what_was_fastest() -> None:
    right = [name for name in SECONDS if llmem_times.choice(name) == quickest(name)]
    assert len(right) >= 8, right


def test_modelled_seconds_are_within_a_factor_of_two_of_all() -> None:
    for name in SECONDS:
        mine = llmem_times.timing(name)
        for method, seconds in llmem_times.measured(name).items():
            assert mine is not None
            assert 0.5 <= mine.seconds[method] / seconds <= 2.1, (name, method)
