"""Parameters on one GPU: whole, split, sharded, trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.memory.counts import ModelCounts, count_model
from src.spec import Finetune, Model
from tests.jobs import LORA, small_model, zoo_model
from tests.small_configs import SMALL_CONFIGS

FULL = Finetune()


def counts(
    model: Model, finetune: Finetune = FULL, *, tp: int = 1, shard: int = 1, threshold: int = 0
) -> ModelCounts:
    return count_model(describe(model), finetune=finetune, tp=tp, shard=shard, threshold=threshold)


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_parts_add_up_to_the_model(name: str) -> None:
    model = small_model(name)
    found = counts(model)
    assert found.all.base == describe(model).num_parameters
    assert found.all.base == found.edges.base + sum(block.base for block in found.blocks)
    assert found.blocks_together.base == sum(block.base for block in found.blocks)
    assert found.largest_block.base == max(block.base for block in found.blocks)
    assert found.all.trained == found.all.base
    assert found.all.adapters == 0


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@pytest.mark.parametrize("shard", [1, 2, 3, 8, 1000])
def test_the_fullest_shard_is_at_least_its_share_and_at_most_all(name: str, shard: int) -> None:
    found = counts(small_model(name), LORA, shard=shard).all
    assert found.base / shard <= found.base_shard <= found.base
    assert found.adapters / shard <= found.adapters_shard <= found.adapters
    if shard == 1:
        assert (found.base_shard, found.adapters_shard) == (found.base, found.adapters)


def test_rows_are_dealt_out_in_runs_rounded_up() -> None:
    # one table of 97 rows of 48: over 4 GPUs the first gets 25 rows
    found = counts(small_model("gpt2"), shard=4)
    decoder = describe(small_model("gpt2"))
    table = next(iter(decoder.stem.parameters()))
    assert table.shape == (97, 48)
    rest = sum(
        -(-parameter.shape[0] // 4) * parameter.numel / parameter.shape[0]
        for parameter in decoder.named_parameters()
        if parameter.shape != (97, 48)
    )
    assert found.all.base_shard == pytest.approx(25 * 48 + rest)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_adapters_are_a_row_and_a_column_per_rank(rank: int) -> None:
    # llama-2-7b: 4 projections of 4096 x 4096 in each of 32 blocks
    finetune = replace(LORA, r=rank)
    found = counts(zoo_model("llama-2-7b"), finetune).all
    assert found.adapters == found.trained == 32 * 4 * rank * (4096 + 4096)
    assert found.base == counts(zoo_model("llama-2-7b")).all.base


@pytest.mark.parametrize(
    ("targets", "trained"),
    [
        # llama-3-8b: 8 key/value heads of 128; 14336 wide; PEFT prints these for r 16
        (("q_proj", "v_proj"), 6_815_744),
        ((), 13_631_488),
        (("all-linear",), 41_943_040),
    ],
)
def test_trained_parameters_of_targets(targets: tuple[str, ...], trained: int) -> None:
    found = counts(zoo_model("llama-3-8b"), replace(LORA, targets=targets))
    assert found.all.trained == trained
    assert found.edges.adapters == 0


@pytest.mark.parametrize("name", ["llama-3-8b", "opt-1.3b", "pythia-160m"])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_splits_blocks_and_leaves_the_edges_whole(name: str, tp: int) -> None:
    whole, split = counts(zoo_model(name)), counts(zoo_model(name), tp=tp)
    assert split.edges == whole.edges
    share = split.blocks_together.base / whole.blocks_together.base
    assert 1 / tp <= share < 1 / tp + 0.01


def test_the_split_side_of_an_adapter_follows_its_linear() -> None:
    # q, k, v split outputs: B of 4096/2 rows; o splits inputs: A of 4096/2 columns
    found = counts(zoo_model("llama-2-7b"), replace(LORA, r=1), tp=2).all
    assert found.adapters == 32 * (3 * (4096 + 2048) + (2048 + 4096))


def test_small_tensors_are_those_up_to_the_threshold() -> None:
    model = zoo_model("llama-2-7b")
    norms = 65 * 4096
    assert counts(model, threshold=4095).all.small == 0
    assert counts(model, threshold=4096).all.small == norms
    assert counts(model, threshold=100_000).all.small == norms
    assert counts(model, threshold=10**9).all.small == counts(model).all.base


def test_blocks_that_differ_are_counted_each() -> None:
    # the first block is dense, the others route to experts
    found = counts(zoo_model("deepseek-v2-lite"))
    assert found.blocks[0].base < found.blocks[1].base
    assert len({block.base for block in found.blocks}) == 2
    assert found.largest_block.base == found.blocks[1].base
