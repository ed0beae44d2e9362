"""Kernel choice and invisible bytes against hand-computed values."""

from __future__ import annotations

import pytest
import torch

from src.measure.kernels import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACE_HOPPER_BYTES,
    KernelWorkspace,
    SdpaKernel,
    choose_sdpa_kernel,
)

aten = torch.ops.aten


def choose(
    dtype: torch.dtype = torch.bfloat16,
    *,
    size: int = 128,
    kv_heads: int = 8,
    mask: bool = False,
    capability: tuple[int, int] = (8, 0),
) -> SdpaKernel:
    query = torch.empty(1, 8, 16, size, dtype=dtype, device="meta")
    key = torch.empty(1, kv_heads, 16, size, dtype=dtype, device="meta")
    return choose_sdpa_kernel(
        query=query,
        key=key,
        value=key,
        has_mask=mask,
        enable_gqa=kv_heads != 8,
        compute_capability=capability,
    )


def test_half_precision_without_a_mask_runs_flash() -> None:
    assert choose() is SdpaKernel.FLASH
    assert choose(torch.float16) is SdpaKernel.FLASH
    assert choose(kv_heads=2) is SdpaKernel.FLASH


def test_what_flash_cannot_runs_memory_efficient() -> None:
    assert choose(torch.float32) is SdpaKernel.EFFICIENT
    assert choose(mask=True) is SdpaKernel.EFFICIENT
    assert choose(size=512) is SdpaKernel.EFFICIENT
    assert choose(torch.float16, capability=(7, 0)) is SdpaKernel.EFFICIENT


def test_what_no_kernel_can_runs_the_composite() -> None:
    assert choose(torch.float32, kv_heads=2) is SdpaKernel.MATH
    assert choose(torch.bfloat16, capability=(7, 5)) is SdpaKernel.MATH


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [((8, 0), CUBLAS_WORKSPACE_BYTES), ((9, 0), CUBLAS_WORKSPACE_HOPPER_BYTES)],
)
def test_each_thread_has_one_cublas_workspace(capability: tuple[int, int], num_bytes: int) -> None:
    rule = KernelWorkspace(capability)
    calls = [rule(aten.mm.default, (), None, backward) for backward in (False, False, True, True)]
    assert calls == [(0, num_bytes), (0, 0), (0, num_bytes), (0, 0)]


def test_the_flash_backward_takes_fp32_accumulators_and_expands_grouped_heads() -> None:
    rule = KernelWorkspace((8, 0))
    query = torch.empty(2, 8, 100, 80, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 100, 80, dtype=torch.bfloat16, device="meta")
    backward = aten._scaled_dot_product_flash_attention_backward.default
    rows = 2 * 8 * 128
    accumulators = rows * 4 + rows * 96 * 4
    assert rule(backward, (query, query, query), None, True) == (accumulators, 0)
    expanded = 2 * (2 * 100 * 8 * 80 * 2)
    assert rule(backward, (query, query, key), None, True) == (accumulators + expanded, 0)


def test_a_short_embedding_backward_sorts_nothing() -> None:
    rule = KernelWorkspace((8, 0))
    result = torch.empty(1000, 64, device="meta")
    for count, sorts in ((3072, False), (3073, True)):
        indices = torch.empty(count, dtype=torch.int64, device="meta")
        transient, lasting = rule(
            aten.embedding_dense_backward.default, (result, indices), result, True
        )
        assert (transient > 0) is sorts
        assert lasting == 0
