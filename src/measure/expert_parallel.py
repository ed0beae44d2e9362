"""Tensor parallelism of stacked experts, as transformers 5 has it: each expert's width is split.

Its plan shards `gate_up_proj` by its columns (gate and up each), `down_proj` by its rows, and sums
over the group what the experts give, and the gradients of what they are given (`moe_tp_experts`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from src.errors import UserError

NAMES = frozenset({"gate_up_proj", "down_proj"})


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of experts, stacked."""
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def check_experts(path: str, module: Any, degree: int) -> None:
    """Refuse experts that the plan does not split.

    Raises:
        UserError: they have other weights than the two, or a width that `degree` does not divide.
    """
    if {name for name, _ in module.named_parameters(recurse=False)} != NAMES:
        raise UserError(
            key="method",
            value="tp",
            allowed=f"no tensor-parallel plan for the experts in {path}; use fsdp",
        )
    width = int(module.down_proj.shape[2])
    if width % degree:
        raise UserError(key="tp", value=degree, allowed=f"a divisor of the {width} rows of {path}")


def split_experts(module: Any, mesh: Any) -> None:
    """Keep this rank's part of every expert and sum over the group."""
    from transformers.distributed.tensor_parallel import MoeExpertsParallel

    degree, rank = mesh.size(), mesh.get_local_rank()
    gate, up = module.gate_up_proj.chunk(2, dim=1)
    columns = [part.chunk(degree, dim=1)[rank] for part in (gate, up)]
    rows = module.down_proj.chunk(degree, dim=2)[rank]
    parts = {"gate_up_proj": torch.cat(columns, dim=1), "down_proj": rows.contiguous()}
    for name, part in parts.items():
        trained = getattr(module, name).requires_grad
        setattr(module, name, nn.Parameter(part.detach(), requires_grad=trained))
    style: Any = MoeExpertsParallel()
    style.install_forward(module, mesh)
