"""How a model was sharded is read back as it was asked of `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from src.errors import UserError
from src.integrations.sharding import read_sharding
from src.measure.blocks import find_blocks
from src.measure.case import parse_case
from src.measure.methods import apply_method, build_meshes, fake_world
from src.spec import Layout, Method, Precision

TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


def tiny() -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**TINY))


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        (Method.FSDP, Layout(dp=4, shard=4)),
        (Method.FSDP_GRAD, Layout(dp=4, shard=4)),
        (Method.HSDP, Layout(dp=4, shard=2)),
    ],
)
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        (Precision.BF16_MIXED, {"loop": {"fsdp_split_root": True}}),
        (Precision.BF16_MIXED, {"fp32_reduce": True}),
        (Precision.FP32, {}),
    ],
)
def test_what_the_builder_does_is_read_back(
    method: Method, layout: Layout, precision: Precision, more: dict[str, Any]
) -> None:
    raw = {
        "model": {"name": "tiny", "config": {"model_type": "llama", **TINY}},
        "method": method,
        "layout": {"dp": layout.dp, "shard": layout.shard},
        "precision": precision,
        **more,
    }
    case, model = parse_case(raw), tiny()
    with fake_world(layout.num_gpus):
        meshes = build_meshes(case.step, device_type="cpu")
        apply_method(model, find_blocks(model), case, meshes)
        found = read_sharding(model, precision, num_gpus=layout.num_gpus)
    assert found is not None
    assert (found.method, found.layout) == (method, layout)
    assert found.fp32_reduce is case.step.job.fp32_reduce
    assert found.has_split_root is case.loop.fsdp_split_root


def test_a_model_that_is_not_sharded_is_not() -> None:
    assert read_sharding(tiny(), Precision.FP32, num_gpus=4) is None


def shard(model: Any, units: list[nn.Module], **more: Any) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for unit in units:
        fully_shard(unit, mesh=mesh, **more)
    fully_shard(model, mesh=mesh, **more)


@pytest.mark.parametrize("what", ["half the blocks", "inside", "offload"])
def test_another_way_of_sharding_is_refused(what: str) -> None:
    model, more = tiny(), {}
    units: list[nn.Module] = find_blocks(model)
    if what == "half the blocks":
        units = units[:1]
    elif what == "inside":
        units = [units[0].mlp, *units]  # type: ignore[list-item]
    else:
        more = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    with fake_world(2):
        shard(model, units, **more)
        with pytest.raises(UserError, match=r"^fsdp="):
            read_sharding(model, Precision.FP32, num_gpus=2)
