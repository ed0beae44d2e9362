"""transformers' own models, built from plain config fields."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")


def build(config: dict[str, Any], *, device: str = "meta", **options: object) -> PreTrainedModel:
    """The causal language model of a config, in training mode; bert as a decoder."""
    extra = {"is_decoder": True} if config["model_type"] == "bert" else {}
    full = AutoConfig.for_model(**config, **extra, use_cache=False)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(full, **options).train()


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same config with the first `layers` layers."""
    changed = dict(config)
    for name in LAYER_FIELDS:
        if name in changed:
            changed[name] = min(layers, changed[name])
    if "attention_types" in changed:
        changed["attention_types"] = [[["global"], layers]]
    if "layer_types" in changed:
        changed["layer_types"] = changed["layer_types"][:layers]
    return changed


def sizes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Sorted shape of every parameter by name; sorted because `Conv1D` is stored transposed."""
    return {name: tuple(sorted(value.shape)) for name, value in model.named_parameters()}
