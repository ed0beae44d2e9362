"""Sequences of different lengths: the worst micro batch, and the mean over all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.memory import estimate_step
from src.plan.compare import compare
from src.plan.expected import expected_bytes, without_padding
from src.spec import Lengths, Method
from tests.jobs import step_of
from tests.plan_requests import request_of


def test_the_longest_of_two_by_hand() -> None:
    lengths = Lengths.of([10, 20, 20, 40])
    assert lengths.padded(2) == [(10, 1 / 16), (20, 9 / 16 - 1 / 16), (40, 1 - 9 / 16)]
    assert lengths.mean == 22.5
    assert lengths.mean_padded(2) == 10 / 16 + 20 * 8 / 16 + 40 * 7 / 16


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=400), batch=st.integers(1, 64))
def test_padding_never_shortens(lengths: list[int], batch: int) -> None:
    found = Lengths.of(lengths)
    points = found.padded(batch)
    assert sum(probability for _, probability in points) == pytest.approx(1)
    assert [length for length, _ in points] == sorted({length for length, _ in points})
    assert points[-1][0] == found.longest == max(lengths)
    assert found.mean * (1 - 1e-12) <= found.mean_padded(batch) <= found.longest * (1 + 1e-12)
    assert (
        found.mean_padded(batch) <= found.mean_padded(batch + 1) * (1 + 1e-12) or len(points) > 99
    )


def test_many_lengths_are_taken_together_at_little_cost() -> None:
    draw = random.Random(7)
    drawn = [draw.randint(1, 4000) for _ in range(20_000)]
    found = Lengths.of(drawn)
    assert len(found.padded(8)) <= 130
    exact = sum(max(draw.choices(drawn, k=8)) for _ in range(20_000)) / 20_000
    assert found.mean_padded(8) == pytest.approx(exact, rel=0.01)


def test_the_mean_peak_is_the_mean_over_drawn_micro_batches() -> None:
    draw = random.Random(3)
    drawn = [draw.choice([64, 128, 512, 1024]) for _ in range(1000)]
    request = request_of("opt-125m", 1)
    step = step_of(replace(request.job, seq_len=1024), Method.SINGLE, micro_batch=16)
    found = expected_bytes(step, Lengths.of(drawn), estimate_step)
    peaks = {
        length: estimate_step(replace(step, job=replace(step.job, seq_len=length))).peak_bytes
        for length in set(drawn)
    }
    longest = [max(draw.choices(drawn, k=16)) for _ in range(40_000)]
    sampled = sum(peaks[length].allocated for length in longest) / len(longest)
    assert found.allocated == pytest.approx(sampled, rel=0.005)
    assert found.allocated < peaks[1024].allocated


def test_one_length_is_no_distribution() -> None:
    step = step_of(request_of("opt-125m", 1).job)
    only = Lengths.of([512, 512])
    assert expected_bytes(step, only, estimate_step) == estimate_step(step).peak_bytes
    assert without_padding(step, only) == (step, 1.0)


def test_a_report_speaks_of_the_longest_and_tells_the_mean() -> None:
    lengths = Lengths.of([128] * 9 + [1024])
    mixed = request_of("opt-1.3b", 2, seq_len=1024, micro_batch=4, lengths=lengths)
    plain = replace(mixed, lengths=None)
    for row, worst in zip(compare(mixed).methods, compare(plain).methods, strict=True):
        assert row.method is worst.method
        assert row.peak_bytes == worst.peak_bytes
        assert row.verdict is worst.verdict
        assert worst.expected_bytes is None
        assert row.expected_bytes is not None
        assert row.expected_bytes.device < row.peak_bytes.device
