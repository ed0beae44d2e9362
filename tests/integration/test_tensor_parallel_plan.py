"""How tensor parallelism splits each Linear of a block, against transformers' own plans."""

from __future__ import annotations

import re

import pytest
from transformers import AutoConfig

from src.architecture import describe
from src.architecture.ops import Linear, Parallel
from src.spec import Model
from tests.small_configs import SMALL_CONFIGS

STYLES = {
    "colwise": Parallel.COLUMN,
    "colwise_gather_output": Parallel.COLUMN_GATHERED,
    "rowwise": Parallel.ROW,
    "rowwise_split_input": Parallel.ROW_SCATTERED,
    "mla_kv_a_proj": Parallel.REPLICATED,
}


def plan_of_blocks(name: str) -> dict[str, str]:
    """Style of every module of a block by its name relative to the block."""
    config = AutoConfig.for_model(**SMALL_CONFIGS[name])
    plan = config.base_model_tp_plan or {}
    matches = {re.match(r"(?:layers|h)\.\*\.(.+)", module): style for module, style in plan.items()}
    return {match.group(1): style for match, style in matches.items() if match}


PLANS = {name: plan for name in SMALL_CONFIGS if (plan := plan_of_blocks(name))}


def test_most_families_have_a_plan() -> None:
    assert len({SMALL_CONFIGS[name]["model_type"] for name in PLANS}) >= 18


@pytest.mark.parametrize("name", PLANS)
def test_linears_are_split_as_transformers_splits_them(name: str) -> None:
    decoder = describe(Model(name=name, hf_id=None, config=SMALL_CONFIGS[name]))
    for block in decoder.blocks:
        for op in block.ops:
            if isinstance(op, Linear):
                style = PLANS[name].get(op.name)
                expected = Parallel.REPLICATED if style is None else STYLES[style]
                assert op.parallel == expected, op.name
