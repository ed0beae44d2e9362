"""Blocks: which are the same object, which differ; windows; values that are read and written."""

from __future__ import annotations

from collections import Counter

import pytest

from src.architecture import Decoder, describe
from src.architecture.ops import Experts, Linear, Parallel
from src.spec import Model
from tests.small_configs import SMALL_CONFIGS


def described(name: str, **changes: object) -> Decoder:
    config = {**SMALL_CONFIGS[name], **changes}
    return describe(Model(name=name, hf_id=None, config=config))


def kinds(decoder: Decoder) -> list[bool]:
    """Whether each block has experts."""
    return [any(isinstance(op, Experts) for op in block.ops) for block in decoder.blocks]


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_equal_blocks_are_the_same_object(name: str) -> None:
    blocks = described(name).blocks
    distinct = {id(block): block for block in blocks}
    assert len(distinct) == len({repr(block) for block in blocks})
    mixed = {"deepseek_v2", "qwen3_moe-mixed"}
    assert len(distinct) == (2 if name in mixed else 1)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek_v2", {}, [False, True, True]),
        ("deepseek_v2", {"first_k_dense_replace": 0}, [True, True, True]),
        ("deepseek_v2", {"first_k_dense_replace": 9}, [False, False, False]),
        ("qwen3_moe", {}, [True, True, True]),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, [False, True, False]),
        ("qwen3_moe-mixed", {}, [False, True, False]),
        ("qwen3_moe-mixed", {"mlp_only_layers": [1]}, [False, False, False]),
    ],
)
def test_which_blocks_have_experts(
    name: str, changes: dict[str, object], expected: list[bool]
) -> None:
    assert kinds(described(name, **changes)) == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, ()),
        ("mistral", {}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, ()),
        ("gemma2", {}, (8, None, 8)),
        ("gemma3_text", {}, (8, None, 8)),
        ("gemma3_text", {"sliding_window_pattern": 6}, (8, 8, 8)),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, ()),
        (
            "gemma3_text",
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            (None, None, 8),
        ),
        ("gpt_oss", {}, (8, None, 8)),
        ("qwen2", {}, ()),
        ("qwen2-upper-windows", {}, (None, None, 8)),
        ("qwen2-upper-windows", {"max_window_layers": 0}, (8, 8, 8)),
    ],
)
def test_windows(name: str, changes: dict[str, object], expected: tuple[int | None, ...]) -> None:
    assert described(name, **changes).windows == expected


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_values_are_written_once_and_before_they_are_read(name: str) -> None:
    decoder = described(name)
    for part in (decoder.stem, *decoder.blocks, decoder.tail, decoder.head):
        known = {part.source}
        for op in part.ops:
            assert set(op.inputs) <= known
            assert op.out not in known
            known.add(op.out)
        assert part.out in known


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_every_value_but_the_last_is_used(name: str) -> None:
    decoder = described(name)
    if decoder.model_type == "deepseek_v2":
        pytest.skip("a copy reads one value; its keys are put together from two")
    for part in (decoder.stem, decoder.blocks[0], decoder.head):
        reads = Counter(value for op in part.ops for value in op.inputs)
        unused = [op.out for op in part.ops if not reads[op.out] and op.out != part.out]
        assert unused == []


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_tensor_parallelism_splits_in_pairs(name: str) -> None:
    """What a Linear splits by its outputs, another one puts together again by its inputs."""
    for block in described(name).blocks:
        split = Counter(op.parallel for op in block.ops if isinstance(op, Linear))
        assert split[Parallel.COLUMN] >= split[Parallel.ROW]
        assert split[Parallel.COLUMN_GATHERED] >= split[Parallel.ROW_SCATTERED]
        assert split[Parallel.ROW] + split[Parallel.ROW_SCATTERED] >= 1


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_lora_has_targets_in_attention(name: str) -> None:
    decoder = described(name)
    targets = [op for op in decoder.blocks[0].ops if isinstance(op, Linear) and op.is_attention]
    assert targets
    assert all(op.is_module for op in targets)


def test_scalings_and_caps_of_the_logits() -> None:
    assert [type(op).__name__ for op in described("gemma2").head.ops] == [
        "Linear",
        "Copy",
        "Activation",
        "Copy",
    ]
    assert [type(op).__name__ for op in described("gemma2-uncapped").head.ops] == ["Linear"]
    assert [type(op).__name__ for op in described("granite").head.ops] == ["Linear", "Copy"]


def test_no_dropout_no_operation() -> None:
    without = {"dropout": 0.0, "attention_dropout": 0}
    names = [type(op).__name__ for op in described("opt", **without).blocks[0].ops]
    assert "Dropout" not in names
    assert described("opt", **without).attention.dropout == 0
