"""How FSDP has sharded a model, read off its modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.measure.blocks import final_norm, find_blocks
from src.measure.build import autocast_dtype
from src.spec import Layout, Method, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What `fully_shard` was told.

    Attributes:
        method: `fsdp`, `fsdp-grad` or `hsdp`.
        layout: over how many GPUs.
        fp32_reduce: whether half-precision gradients are reduced in fp32.
        has_split_root: whether embedding and head are units of their own.
    """

    method: Method
    layout: Layout
    fp32_reduce: bool
    has_split_root: bool


def read_sharding(model: nn.Module, precision: Precision, *, num_gpus: int) -> Sharding | None:
    """How the model is sharded; None: not at all.

    Raises:
        UserError: in a way that no case has.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise _refuse("FullyShardedDataParallel", "FSDP1 is not read; fsdp_config version 2 is")
    units: set[nn.Module] = {m for m in model.modules() if isinstance(m, FSDPModule)}
    if not units:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise _refuse("DTensor", "tensor parallelism is not read")
        return None
    groups = list(_groups(units))
    has_split_root = _read_units(model, units)
    blocks = [group for block in find_blocks(model) for group in _groups({block})]
    mesh = _only({(_shard_size(group), group.mesh_info.mesh.ndim) for group in groups}, "meshes")
    shard, num_dims = mesh
    reshards = _only({group.post_forward_mesh_info is not None for group in blocks}, "resharding")
    is_hybrid = num_dims > 1 and shard < num_gpus
    if is_hybrid and not reshards:
        raise _refuse("hybrid", "hybrid sharding that keeps gathered weights")
    if any(type(group.offload_policy).__name__ != "OffloadPolicy" for group in groups):
        raise _refuse("cpu_offload", "no offload")
    return Sharding(
        method=Method.HSDP if is_hybrid else Method.FSDP if reshards else Method.FSDP_GRAD,
        layout=Layout(dp=num_gpus, shard=shard),
        fp32_reduce=_read_policy(groups, precision),
        has_split_root=has_split_root,
    )


def _groups(units: set[nn.Module]) -> Iterator[Any]:
    """FSDP's own records of the parameters of these units."""
    for unit in units:
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if groups is None else groups
        yield from (group for group in groups if group is not None)


def _shard_size(group: Any) -> int:
    return int(group.mesh_info.shard_mesh_size)


def _only(values: set[Any], what: str) -> Any:
    if len(values) != 1:
        raise _refuse(what, "the same for all units")
    return next(iter(values))


def _read_units(model: nn.Module, units: set[nn.Module]) -> bool:
    """Whether embedding and head are units, beside every block and the root."""
    expected = {model, *find_blocks(model)}
    if not expected <= units:
        raise _refuse("units", "every block is a unit")
    norm: Any = final_norm(model)
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}  # type: ignore[operator]
    ends |= set() if norm is None else {norm[1]}
    others = units - expected
    if others and others != ends - {None}:
        raise _refuse("units", "blocks and root, with or without embedding, norm and head")
    return bool(others)


def _read_policy(groups: list[Any], precision: Precision) -> bool:
    """Whether gradients are reduced in fp32 although the computation is in half precision."""
    dtype = autocast_dtype(precision)
    policies = {
        (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype, group.mp_policy.output_dtype)
        for group in groups
    }
    compute, reduce, output = _only(policies, "mixed precision")
    is_fp32 = dtype is not None and reduce is torch.float32
    if compute != dtype or output != dtype or not (is_fp32 or reduce in (dtype, None)):
        words = "/".join(str(kind) for kind in (compute, reduce, output))
        raise _refuse(f"mixed precision {words}", f"{dtype} throughout, or reduced in fp32")
    return is_fp32


def _refuse(value: str, allowed: str) -> UserError:
    return UserError(key="fsdp", value=value, allowed=allowed)
