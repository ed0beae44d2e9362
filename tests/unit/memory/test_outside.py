"""CUDA context and NCCL: one figure for the formula and the dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.measure.reservation import reserve
from src.memory import level_model
from src.memory.outside import communicators, context_bytes, nccl_bytes
from src.spec import Layout, Method
from src.units import MIB
from tests.jobs import gpu, layout_of


def test_a_measured_context_is_taken_and_another_scaled() -> None:
    card = gpu("a100-80gb")
    unknown = replace(card, context_mib=None)
    assert context_bytes(replace(card, context_mib=500)) == 500 * MIB
    assert context_bytes(unknown) == pytest.approx(481 * MIB, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "sizes", "mib"),
    [
        (Layout(), (), 0),
        (Layout(tp=4), (4,), 1485),
        (Layout(dp=4), (4,), 1485),
        (Layout(dp=4, shard=4), (4,), 1485),
        (Layout(dp=2, tp=2), (2, 2), 1485 + 544),
        (Layout(dp=8, shard=4), (2, 4), 1485 + 688),
        (Layout(dp=8, shard=4, tp=2), (2, 4, 2), 1485 + 688 + 544),
    ],
)
def test_the_first_communicator_brings_the_kernels(
    layout: Layout, sizes: tuple[int, ...], mib: int
) -> None:
    assert communicators(layout) == sizes
    assert nccl_bytes(layout) == mib * MIB


@pytest.mark.parametrize("method", [Method.SINGLE, Method.DDP, Method.FSDP, Method.FSDP_TP])
@pytest.mark.parametrize("sku", ["a100-80gb", "rtx-3090"])
def test_formula_and_dry_run_add_the_same(method: Method, sku: str) -> None:
    layout, card = layout_of(method, 1 if method is Method.SINGLE else 4), gpu(sku)
    replayed = reserve([], gpu=card, layout=layout, measured_step=2)
    assert replayed.outside_bytes == level_model(layout, card).outside
