"""The repeated blocks of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from src.errors import UserError
from src.measure.extend import MIDDLE, RUN_BLOCKS

SHORTEN_FROM = RUN_BLOCKS + 2
"""Models with fewer blocks are run whole."""


def _block_list(model: nn.Module) -> nn.ModuleList:
    best: nn.ModuleList | None = None
    most = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > most:
                best, most = module, size
    if best is None:
        raise UserError(
            key="model", value=type(model).__name__, allowed="a model with a list of blocks"
        )
    return best


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks, in order: its largest list of modules with parameters.

    Raises:
        UserError: the model has no list of blocks.
    """
    return list(_block_list(model))


def _kind(config: Any, block: nn.Module, index: int) -> tuple[object, ...]:
    """What sets a block apart: its tensors, and what the config says of its place."""
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype)
        for store in (block.named_parameters(), block.named_buffers())
        for name, tensor in store
    ]
    places = []
    for name in ("layer_types", "attention_layers", "mlp_layer_types", "no_rope_layers"):
        values = getattr(config, name, None)
        if isinstance(values, (list, tuple)) and index < len(values):
            places.append(values[index])
    return type(block).__name__, tuple(tensors), tuple(places)


def shorten(model: Any) -> int:
    """Leave `RUN_BLOCKS` blocks if those between the first and the last are all alike; in place.

    Returns:
        The number of blocks that the model had if some were taken out, else 0.
    """
    blocks = _block_list(model)
    total = len(blocks)
    if total < SHORTEN_FROM:
        return 0
    kinds = {_kind(model.config, blocks[index], index) for index in range(1, total - 1)}
    if len(kinds) > 1:
        return 0
    del blocks[MIDDLE + 1 : total - MIDDLE]
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(model.config, name):
            setattr(model.config, name, RUN_BLOCKS)
    return total


FINAL_NORMS = ("norm", "final_layer_norm", "ln_f", "final_layernorm", "layer_norm")
"""Names of the norm between the blocks and the head."""


def final_norm(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Name and module of the norm between the blocks and the head; None where there is none."""
    for name in FINAL_NORMS:
        for path, module in model.named_modules():
            own = path.removeprefix("base_model.model.")
            if own.rsplit(".", 1)[-1] == name and own.count(".") <= 2:
                return path, module
    return None
