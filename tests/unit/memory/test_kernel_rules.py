"""Which attention kernel runs, rule by rule, by PyTorch's `sdp_utils.cpp` (2.11 to 2.13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import Decoder, describe
from src.architecture.ops import Attention as AttentionOp
from src.errors import UserError
from src.memory import Kernel, choose_kernel, implementation
from src.spec import Attention, Gpu, Job, Precision
from tests.jobs import gpu, small_model, zoo_model

HALF = (Precision.BF16_MIXED, Precision.BF16_TRUE, Precision.FP16_MIXED)


def decoder(**heads: object) -> Decoder:
    """A llama whose attention differs in some fields."""
    found = describe(zoo_model("llama-2-7b"))
    block = found.blocks[0]
    ops = tuple(replace(op, **heads) if isinstance(op, AttentionOp) else op for op in block.ops)
    return replace(found, blocks=(replace(block, ops=ops),))


def card(major: int, minor: int) -> Gpu:
    return replace(gpu(), compute_capability=(major, minor))


def kernel(
    heads: Decoder,
    precision: Precision = Precision.BF16_TRUE,
    *,
    capability: tuple[int, int] = (8, 0),
    masked: bool = False,
    attention: Attention = Attention.SDPA,
) -> Kernel:
    job = Job(model=zoo_model("llama-2-7b"), precision=precision, attention=attention)
    return choose_kernel(heads, job, card(*capability), masked=masked)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("precision", HALF)
def test_flash_takes_half_precision_heads_up_to_256(head_dim: int, precision: Precision) -> None:
    heads = decoder(head_dim=head_dim, value_head_dim=head_dim)
    assert kernel(heads, precision) is Kernel.FLASH


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_flash_runs_from_ampere_on(capability: tuple[int, int]) -> None:
    assert kernel(decoder(), capability=capability) is Kernel.FLASH


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (7, 5)])
@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.FP16_MIXED, Kernel.EFFICIENT),
        (Precision.FP32, Kernel.EFFICIENT),
        (Precision.BF16_TRUE, Kernel.MATH),
        (Precision.BF16_MIXED, Kernel.MATH),
    ],
)
def test_before_ampere(capability: tuple[int, int], precision: Precision, expected: Kernel) -> None:
    assert kernel(decoder(), precision, capability=capability) is expected


@pytest.mark.parametrize(
    ("groups", "expected"), [(32, Kernel.EFFICIENT), (8, Kernel.MATH), (1, Kernel.MATH)]
)
def test_the_memory_efficient_kernel_takes_no_grouped_heads(groups: int, expected: Kernel) -> None:
    assert kernel(decoder(num_kv_heads=groups), Precision.FP32) is expected


@pytest.mark.parametrize("groups", [32, 8, 1])
@pytest.mark.parametrize("precision", [*HALF, Precision.FP32])
def test_heads_are_repeated_under_a_mask(groups: int, precision: Precision) -> None:
    heads = decoder(num_kv_heads=groups)
    assert kernel(heads, precision, masked=True) is Kernel.EFFICIENT


def test_values_narrower_than_queries_are_not_for_flash() -> None:
    assert kernel(decoder(head_dim=192, value_head_dim=128)) is Kernel.EFFICIENT


@pytest.mark.parametrize("precision", [*HALF, Precision.FP32])
def test_a_bias_per_position_is_a_mask(precision: Precision) -> None:
    assert kernel(decoder(alibi=True), precision) is Kernel.EFFICIENT


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("groups", [32, 8])
def test_flash_asked_for_is_flash_or_refused(capability: tuple[int, int], groups: int) -> None:
    heads = decoder(num_kv_heads=groups)
    asked = Attention.FLASH
    assert kernel(heads, capability=capability, attention=asked) is Kernel.FLASH
    with pytest.raises(UserError, match=r"attention=flash: needs compute capability 8\.0"):
        kernel(heads, capability=(7, 5), attention=asked)
    with pytest.raises(UserError, match="attention=flash: needs a half precision"):
        kernel(heads, Precision.FP32, capability=capability, attention=asked)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
def test_eager_asked_for_is_eager(precision: Precision, capability: tuple[int, int]) -> None:
    found = kernel(decoder(), precision, capability=capability, attention=Attention.EAGER)
    assert found is Kernel.EAGER


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "gemma2", "gpt_oss"])
def test_families_without_sdpa_fall_back_to_eager_by_themselves(name: str) -> None:
    job = Job(model=small_model(name))
    assert implementation(describe(job.model), job) is Attention.EAGER
