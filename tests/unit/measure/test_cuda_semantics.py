"""Operators on fake CPU tensors save and return what CUDA's do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from src.measure.cuda_semantics import cuda_semantics

functional = torch.nn.functional


@pytest.fixture
def half() -> Iterator[torch.Tensor]:
    with cuda_semantics((8, 0)), FakeTensorMode():
        yield torch.empty(4, 8, 16, dtype=torch.bfloat16, requires_grad=True)


def test_autocast_runs_cudas_list_in_fp32(half: torch.Tensor) -> None:
    weight = torch.empty(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = {
            "pow": half.pow(2),
            "rsqrt": half.rsqrt(),
            "sum": half.sum(-1),
            "softmax": functional.softmax(half, -1),
            "layer_norm": functional.layer_norm(half, (16,)),
            "cross_entropy": functional.cross_entropy(
                half.view(-1, 16), torch.empty(32, dtype=torch.int64)
            ),
        }
        assert {name: t.dtype for name, t in results.items()} == dict.fromkeys(
            results, torch.float32
        )
        assert functional.linear(half, weight).dtype is torch.bfloat16
        assert half.mean(-1).dtype is torch.bfloat16


def test_dropout_saves_a_one_byte_mask(half: torch.Tensor) -> None:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        functional.dropout(half, 0.1, training=True)
    assert [tensor.dtype for tensor in saved] == [torch.bool]


def test_softmax_to_fp32_makes_no_fp32_copy_of_its_input(half: torch.Tensor) -> None:
    result = functional.softmax(half, -1, dtype=torch.float32)
    assert result.dtype is torch.float32
    assert type(result.grad_fn).__name__ == "SoftmaxBackward0"
    assert result.grad_fn.next_functions[0][0] is not None
    assert "ToCopy" not in type(result.grad_fn.next_functions[0][0]).__name__


def test_grouped_query_attention_runs_flash_unexpanded(half: torch.Tensor) -> None:
    del half
    query = torch.empty(2, 8, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    key = torch.empty(2, 2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    result = functional.scaled_dot_product_attention(
        query, key, key, is_causal=True, enable_gqa=True
    )
    assert "FlashAttention" in type(result.grad_fn).__name__


def test_the_semantics_end_with_the_context() -> None:
    with cuda_semantics((8, 0)):
        pass
    tensor = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert functional.softmax(tensor, -1).dtype is torch.bfloat16
