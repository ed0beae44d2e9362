"""The repeated blocks of a model."""

from __future__ import annotations

from torch import nn

from src.errors import UserError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's transformer blocks, in order: its largest list of modules with parameters.

    Raises:
        UserError: the model has no list of blocks.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > most:
                best, most = list(module), size
    if not best:
        raise UserError(
            key="model", value=type(model).__name__, allowed="a model with a list of blocks"
        )
    return best
