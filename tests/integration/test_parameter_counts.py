"""Names and sizes of parameters, against transformers' own models on the meta device."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn
from transformers.activations import ACT2CLS

from src.architecture import Decoder, describe, supported_model_types
from src.architecture.fields import FUNCTIONS
from src.architecture.ops import Embed, Norm
from src.errors import UserError
from src.spec import Attention, Model
from tests.small_configs import SMALL_CONFIGS
from tests.transformers_models import build, sizes, with_layers

ROOT = Path(__file__).parents[2]
SHARED_ZOO = ROOT.parent / "shared" / "zoo.json"
BUFFER_SLACK_BYTES = 16 * 1024


@lru_cache(maxsize=1)
def zoo() -> dict[str, dict[str, Any]]:
    """Every model file by name."""
    files = sorted((ROOT / "conf" / "model").glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


def described(config: dict[str, Any]) -> Decoder:
    return describe(Model(name="test", hf_id=None, config=config))


def described_sizes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    names = [parameter.name for parameter in decoder.named_parameters()]
    assert len(names) == len(set(names))
    return {item.name: tuple(sorted(item.shape)) for item in decoder.named_parameters()}


def assert_same_parts(decoder: Decoder, model: nn.Module) -> None:
    """Embeddings, blocks, final norm, head and tying each by themselves."""
    named = dict(model.named_parameters())
    inside = f"{decoder.blocks_path}."
    outside = {name: value for name, value in named.items() if not name.startswith(inside)}
    blocks = sum(value.numel() for name, value in named.items() if name.startswith(inside))
    assert sum(block.num_parameters for block in decoder.blocks) == blocks

    embeddings = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)
    )
    stem = [op for op in decoder.stem.ops if isinstance(op, Embed)]
    assert sum(item.numel for op in stem for item in op.parameters()) == embeddings

    norms = {
        name: value.numel()
        for name, value in outside.items()
        if type(model.get_submodule(name.rpartition(".")[0])).__name__.endswith("Norm")
    }
    edges = (*decoder.stem.ops, *decoder.tail.ops, *decoder.head.ops)
    described_norms = [item for op in edges if isinstance(op, Norm) for item in op.parameters()]
    assert {item.name: item.numel for item in described_norms} == norms

    output = model.get_output_embeddings()
    tied = output.weight is model.get_input_embeddings().weight
    assert decoder.lm_head.tied == tied
    own = 0 if tied else output.weight.numel()
    bias = 0 if output.bias is None else output.bias.numel()
    assert sum(item.numel for item in decoder.lm_head.parameters()) == own + bias


def test_zoo_is_there() -> None:
    assert len(zoo()) >= 90
    assert {item["config"]["model_type"] for item in zoo().values()} <= set(supported_model_types())


@pytest.mark.parametrize("name", zoo())
def test_totals_in_full(name: str) -> None:
    item = zoo()[name]
    assert described(item["config"]).num_parameters == item["num_parameters"]


@pytest.mark.parametrize("name", zoo())
def test_names_and_shapes_of_the_first_layers(name: str) -> None:
    config = with_layers(zoo()[name]["config"], 2)
    decoder = described(config)
    model = build(config)
    assert described_sizes(decoder) == sizes(model)
    assert_same_parts(decoder, model)


def test_totals_equal_the_shared_zoo() -> None:
    if not SHARED_ZOO.exists():
        pytest.skip("no shared zoo beside this checkout")
    for name, item in json.loads(SHARED_ZOO.read_text()).items():
        assert described(item["config"]).num_parameters == item["meta_params"], name


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_variants_of_every_family(name: str) -> None:
    config = SMALL_CONFIGS[name]
    decoder = described(config)
    model = build(config)
    assert described_sizes(decoder) == sizes(model)
    assert_same_parts(decoder, model)
    bytes_ = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert abs(bytes_ - decoder.buffer_bytes) <= BUFFER_SLACK_BYTES


@pytest.mark.parametrize("name", ["gpt-neo-125m", "starcoder", "codegen-350m", "gpt-j-6b"])
def test_buffers_that_matter(name: str) -> None:
    config = with_layers(zoo()[name]["config"], 2)
    bytes_ = sum(buffer.numel() * buffer.element_size() for buffer in build(config).buffers())
    assert abs(bytes_ - described(config).buffer_bytes) <= BUFFER_SLACK_BYTES


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_attention_implementations_and_loss(name: str) -> None:
    decoder = described(SMALL_CONFIGS[name])
    model = build(SMALL_CONFIGS[name])
    assert Attention.EAGER in decoder.implementations
    assert (Attention.SDPA in decoder.implementations) == model._supports_sdpa
    if name != "falcon-alibi-sequential":
        named = model._compatible_flash_implementations or ["flash_attention_2"]
        flash = model._supports_flash_attn and "flash_attention_2" in named
        assert (Attention.FLASH in decoder.implementations) == flash
    assert decoder.loss_upcast
    assert model.loss_function.__name__ == "ForCausalLMLoss"


LEFT_OUT = [
    (name, field)
    for name, config in SMALL_CONFIGS.items()
    for field in config
    if field not in ("model_type", "vocab_size", "pad_token_id")
]


@pytest.mark.parametrize(("name", "field"), LEFT_OUT)
def test_a_field_left_out_is_an_error_or_means_what_transformers_takes(
    name: str, field: str
) -> None:
    config = {key: value for key, value in SMALL_CONFIGS[name].items() if key != field}
    with suppress(UserError):
        assert described_sizes(described(config)) == sizes(build(config))


def test_known_activation_functions() -> None:
    with_parameters = {"prelu", "xielu"}
    assert set(FUNCTIONS) == set(ACT2CLS) - with_parameters
