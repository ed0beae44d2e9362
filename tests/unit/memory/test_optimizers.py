"""States and temporaries of each optimizer, by hand, on three tensors."""

from __future__ import annotations

import pytest

from src.architecture import describe
from src.memory import count_model
from src.memory.counts import Tensor, trained_tensors
from src.memory.optimizers import paged_bytes, state_bytes, temporary_bytes
from src.spec import Finetune, Optimizer
from tests.jobs import LORA, zoo_model

TABLE = Tensor(shape=(500, 400), numel=200_000, is_embedding=True, is_edge=True)
MATRIX = Tensor(shape=(300, 400), numel=120_000)
VECTOR = Tensor(shape=(400,), numel=400)
TENSORS = (TABLE, MATRIX, VECTOR)
TOTAL = 200_000 + 120_000 + 400


@pytest.mark.parametrize(
    ("optimizer", "stored", "expected"),
    [
        (Optimizer.ADAMW, 4, 8 * TOTAL),
        (Optimizer.ADAMW_FUSED, 2, 4 * TOTAL),
        (Optimizer.ADAMW_LOOP, 4, 8 * TOTAL),
        (Optimizer.SGD, 4, 0),
        (Optimizer.SGD_MOMENTUM, 2, 2 * TOTAL),
        # fp32 whatever the parameter's dtype.
        (Optimizer.LION, 2, 4 * TOTAL),
        # Two bytes of the matrix, two scales for each of its 469 runs of 256, two shared tables;
        # the embedding and the vector in fp32.
        (Optimizer.ADAMW_8BIT, 4, 2 * 120_000 + 8 * 469 + 2 * 1024 + 8 * 200_400),
        # Only what has fewer than 100,000 elements stays on the GPU, and the scales.
        (Optimizer.PAGED_ADAMW, 4, 8 * 400),
        (Optimizer.PAGED_ADAMW_8BIT, 4, 8 * 469 + 2 * 1024 + 8 * 400),
        # A mean per row and one per column; the vector's in full.
        (Optimizer.ADAFACTOR, 2, 4 * (500 + 400 + 300 + 400 + 400)),
        # One momentum of the block's matrix, AdamW's two states of the rest.
        (Optimizer.MUON, 4, 4 * 120_000 + 8 * 200_400),
    ],
)
def test_states(optimizer: Optimizer, stored: int, expected: int) -> None:
    assert state_bytes(optimizer, TENSORS, stored) == expected


def test_large_paged_states_are_not_on_the_gpu() -> None:
    assert paged_bytes(Optimizer.PAGED_ADAMW, TENSORS) == 8 * 320_000
    assert paged_bytes(Optimizer.PAGED_ADAMW_8BIT, TENSORS) == 2 * 120_000 + 8 * 200_000
    assert paged_bytes(Optimizer.ADAMW_8BIT, TENSORS) == 0


@pytest.mark.parametrize(
    ("optimizer", "stored", "expected"),
    [
        (Optimizer.ADAMW, 4, 4 * TOTAL),
        (Optimizer.ADAMW_FUSED, 4, 0),
        (Optimizer.ADAMW_LOOP, 2, 2 * 200_000 * 2),
        (Optimizer.ADAMW_8BIT, 4, 0),
        (Optimizer.LION, 4, 0),
        (Optimizer.SGD, 4, 0),
        # The matrix behind the table: the table's update, two tensors of its own; the table alone
        # takes two of its own, which is less than that.
        (Optimizer.ADAFACTOR, 4, 4 * (200_000 + 2 * 120_000)),
        # From half precision two more of the table: its gradient and itself in fp32.
        (Optimizer.ADAFACTOR, 2, 4 * 4 * 200_000),
        (Optimizer.MUON, 4, 120_000 * 4 + 2 * 120_000 * 2 + 2 * 300 * 300 * 2),
    ],
)
def test_temporaries(optimizer: Optimizer, stored: int, expected: int) -> None:
    assert temporary_bytes(optimizer, TENSORS, stored) == expected


@pytest.mark.parametrize("name", ["opt-350m", "bloom-560m", "mixtral-8x7b", "bert-base-uncased"])
@pytest.mark.parametrize("finetune", [Finetune(), LORA])
@pytest.mark.parametrize("shard", [1, 3])
def test_tensors_add_up_to_the_counts(name: str, finetune: Finetune, shard: int) -> None:
    decoder = describe(zoo_model(name))
    tensors = trained_tensors(decoder, finetune=finetune, shard=shard)
    counts = count_model(decoder, finetune=finetune, shard=shard).all
    assert sum(tensor.numel for tensor in tensors) == pytest.approx(counts.trained_shard)
