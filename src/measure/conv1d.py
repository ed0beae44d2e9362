"""Tensor-parallel styles of GPT-2's `Conv1D`: a Linear whose weight is stored (inputs, outputs)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel


def _distribute(module: nn.Module, mesh: Any, *, weight: Any, bias: Any) -> None:
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(module, name)
        shard = distribute_tensor(parameter, mesh, [placement])
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class ColumnConv1D(ColwiseParallel):
    """Outputs split over the mesh."""

    def _partition_fn(self, _name: str, module: nn.Module, mesh: Any) -> None:
        _distribute(module, mesh, weight=Shard(1), bias=Shard(0))

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return _apply(self, module, device_mesh)


class RowConv1D(RowwiseParallel):
    """Inputs split over the mesh, outputs summed."""

    def _partition_fn(self, _name: str, module: nn.Module, mesh: Any) -> None:
        _distribute(module, mesh, weight=Shard(0), bias=Replicate())

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _apply(self, module, device_mesh)


def _apply(style: Any, module: nn.Module, mesh: Any) -> nn.Module:
    from functools import partial

    from torch.distributed.tensor import distribute_module

    return distribute_module(
        module,
        mesh,
        style._partition_fn,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )
