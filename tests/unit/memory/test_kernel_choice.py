"""Which attention kernel runs, by PyTorch's rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.errors import UserError
from src.memory import Kernel, choose_kernel
from src.spec import Attention, Job, Precision
from tests.jobs import gpu, zoo_model

CASES = [
    # model, precision, gpu, masked -> kernel
    ("opt-1.3b", Precision.BF16_MIXED, "a100-80gb", False, Kernel.FLASH),
    ("llama-3-8b", Precision.BF16_TRUE, "h100-80gb", False, Kernel.FLASH),
    ("gemma-2b", Precision.BF16_TRUE, "a100-80gb", False, Kernel.FLASH),  # heads of 256
    ("opt-1.3b", Precision.FP32, "a100-80gb", False, Kernel.EFFICIENT),  # flash is half only
    ("opt-1.3b", Precision.FP16_MIXED, "v100-16gb", False, Kernel.EFFICIENT),  # before 8.0
    ("opt-1.3b", Precision.BF16_MIXED, "v100-16gb", False, Kernel.MATH),  # bf16 from 8.0 on
    ("opt-1.3b", Precision.FP16_MIXED, "t4", False, Kernel.EFFICIENT),
    ("llama-3-8b", Precision.FP32, "a100-80gb", False, Kernel.MATH),  # grouped heads
    ("llama-3-8b", Precision.FP16_MIXED, "v100-16gb", False, Kernel.MATH),
    ("mistral-7b-v0.1", Precision.BF16_MIXED, "a100-80gb", True, Kernel.EFFICIENT),  # repeated
    ("falcon-7b", Precision.BF16_MIXED, "a100-80gb", False, Kernel.MATH),  # one head, ungrouped
    ("falcon-40b", Precision.BF16_MIXED, "a100-80gb", False, Kernel.EFFICIENT),
    ("deepseek-v2-lite", Precision.BF16_MIXED, "a100-80gb", False, Kernel.EFFICIENT),  # 192, 128
    ("bloom-560m", Precision.BF16_MIXED, "a100-80gb", False, Kernel.EAGER),
    ("gemma-2-2b", Precision.BF16_MIXED, "a100-80gb", False, Kernel.EAGER),
]


@pytest.mark.parametrize(("name", "precision", "sku", "masked", "kernel"), CASES)
def test_sdpa(name: str, precision: Precision, sku: str, masked: bool, kernel: Kernel) -> None:
    job = Job(model=zoo_model(name), precision=precision)
    assert choose_kernel(describe(job.model), job, gpu(sku), masked=masked) is kernel


@pytest.mark.parametrize(
    ("name", "precision", "sku"),
    [
        ("opt-1.3b", Precision.FP32, "a100-80gb"),
        ("opt-1.3b", Precision.FP16_MIXED, "v100-16gb"),
        ("bloom-560m", Precision.BF16_MIXED, "a100-80gb"),
    ],
)
def test_flash_that_does_not_exist_is_refused(name: str, precision: Precision, sku: str) -> None:
    job = Job(model=zoo_model(name), precision=precision, attention=Attention.FLASH)
    with pytest.raises(UserError, match="attention=flash"):
        choose_kernel(describe(job.model), job, gpu(sku))


def test_eager_is_eager() -> None:
    job = replace(Job(model=zoo_model("opt-1.3b")), attention=Attention.EAGER)
    assert choose_kernel(describe(job.model), job, gpu()) is Kernel.EAGER


def test_heads_that_do_not_divide_by_eight_go_to_the_math_kernel() -> None:
    model = zoo_model("opt-1.3b", hidden_size=3200, word_embed_proj_dim=3200)  # heads of 100
    job = Job(model=model, precision=Precision.FP16_MIXED)
    assert choose_kernel(describe(model), job, gpu("v100-16gb")) is Kernel.MATH
    wide = replace(job, precision=Precision.FP32)
    assert choose_kernel(describe(model), wide, gpu("v100-16gb")) is Kernel.EFFICIENT
