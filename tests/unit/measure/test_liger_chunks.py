"""The stand-in for Liger's fused loss."""

from __future__ import annotations

import pytest
import torch

from src.measure.liger import FusedLinearCrossEntropy, chunk_size
from src.memory.size import Shape


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "rows"),
    [
        (16_384, 4096, 32_000, 2048),  # the example in Liger's own source
        (2048, 2048, 128_256, 64),
        (100, 64, 64, 100),  # one chunk covers all tokens, and never more
        (1, 4096, 32_000, 1),
    ],
)
def test_rows_of_a_chunk(tokens: int, hidden: int, vocab: int, rows: int) -> None:
    assert chunk_size(tokens, hidden=hidden, vocab=vocab) == rows
    assert Shape.of(1, tokens, num_chunks=-(-vocab // hidden)).rows == rows


def test_gradients_have_the_shapes_of_what_they_belong_to() -> None:
    hidden = torch.randn(7, 4, requires_grad=True)
    weight = torch.randn(30, 4, requires_grad=True)
    labels = torch.randint(0, 30, (7,))
    loss = FusedLinearCrossEntropy.apply(hidden, weight, labels, (8, 0))
    assert loss.shape == ()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    frozen = weight.detach()
    FusedLinearCrossEntropy.apply(hidden, frozen, labels, (8, 0)).backward()
    assert frozen.grad is None
