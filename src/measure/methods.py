"""Spread a model over GPUs: PyTorch's own wrappers, over a real or a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.measure.blocks import final_norm
from src.measure.build import autocast_dtype
from src.measure.case import Case
from src.measure.fsdp1 import wrap_fsdp1
from src.measure.options import LoopOptions
from src.measure.tensor_parallel import parallelize
from src.spec import Method, Step, uneven_sequence
from src.units import MIB

DDP_FIRST_BUCKET_BYTES = 1 * MIB
DDP_BUCKET_BYTES = 25 * MIB
"""`DistributedDataParallel`'s defaults (`_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """Device meshes of a layout; None where its degree is 1.

    Attributes:
        data: the GPUs that parameters are sharded over (and, in front, replicated over).
        tensor: the tensor-parallel group.
    """

    data: Any = None
    tensor: Any = None


@contextmanager
def fake_world(num_gpus: int) -> Iterator[None]:
    """Within it, this process is rank 0 of `num_gpus` whose collectives do nothing."""
    if num_gpus == 1:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_gpus)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_meshes(step: Step, *, device_type: str) -> Meshes:
    """The meshes of the step's layout; call it outside the fake-tensor mode."""
    layout = step.layout
    if layout.num_gpus == 1:
        return Meshes()
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (layout.dp // layout.shard, layout.shard, layout.tp)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"]
    return Meshes(
        data=data if step.method.is_fsdp else None,
        tensor=mesh["tp"] if layout.tp > 1 else None,
    )


def check_layout(step: Step, loop: LoopOptions) -> None:
    """Refuse a layout that does not belong to the method.

    Raises:
        UserError: says what the method's layout is.
    """
    method, layout = step.method, step.layout
    if method is Method.SINGLE and layout.num_gpus > 1:
        raise UserError(key="layout", value=layout.num_gpus, allowed="single runs on 1 GPU")
    if not method.has_tensor_parallel and layout.tp > 1:
        raise UserError(key="layout.tp", value=layout.tp, allowed=f"1 with method={method}")
    if method.is_fsdp and layout.dp > 1 and layout.shard == 1:
        raise UserError(
            key="layout.shard", value=1, allowed=f"2 or more, a divisor of dp, with method={method}"
        )
    uneven = uneven_sequence(step.job, layout)
    if uneven is not None:
        raise uneven
    if loop.fsdp1 and method is not Method.FSDP:
        raise UserError(key="loop.fsdp1", value="true", allowed="only with method=fsdp")


def apply_method(
    model: nn.Module,
    blocks: list[nn.Module],
    case: Case,
    meshes: Meshes,
    *,
    make_real: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """`model`, split over the tensor-parallel group and sharded.

    `DistributedDataParallel` is not applied here: its reducer runs on real GPUs only.

    Args:
        model: on a device, or on the meta device if `make_real` is given.
        blocks: its blocks.
        case: the step.
        meshes: its device meshes.
        make_real: puts what is on the meta device of a module on the GPU; called for each block
            before it is sharded, so that the whole model need not fit.
    """
    if meshes.tensor is not None:
        if make_real is not None:
            make_real(model)
        parallelize(model, blocks, meshes.tensor, case.step.job)
        if case.step.job.vocab_parallel:
            from src.measure.vocab_parallel import split_vocabulary

            split_vocabulary(model, meshes.tensor, case.step.job)
    if not case.step.method.is_fsdp or meshes.data is None:
        return model
    if case.loop.fsdp1:
        return wrap_fsdp1(model, blocks, case, meshes.data)
    _fully_shard(model, blocks, case, meshes.data, make_real or (lambda _module: None))
    return model


def _fully_shard(
    model: nn.Module,
    blocks: list[nn.Module],
    case: Case,
    mesh: Any,
    make_real: Callable[[nn.Module], None],
) -> None:
    """Each block a unit, the root the last one (accelerate's `fsdp2_prepare_model`).

    accelerate gives `MixedPrecisionPolicy` the half-precision dtype for parameters, for the
    reduction and for outputs.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = autocast_dtype(case.step.job.precision)
    reduce = torch.float32 if case.step.job.fp32_reduce else dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, output_dtype=dtype)
    reshard = case.step.method is not Method.FSDP_GRAD
    for block in blocks:
        make_real(block)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    make_real(model)
    if case.loop.fsdp_split_root:
        _shard_ends(model, mesh, policy, reshard)
    fully_shard(
        model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False
    )


def _shard_ends(model: Any, mesh: Any, policy: Any, reshard: bool) -> None:
    """Embedding and head as units of their own, as accelerate 1.15 makes them."""
    from torch.distributed.fsdp import fully_shard

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    tail = [head] if embedding.weight is not head.weight else [embedding, head]
    norm = final_norm(model)
    if norm is not None:
        tail.insert(0, norm[1])
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def ddp_bucket_bytes(parameters: list[nn.Parameter]) -> list[int]:
    """Sizes of `DistributedDataParallel`'s buckets, in the order in which gradients become ready.

    Source: `compute_bucket_assignment_by_size`, torch/csrc/distributed/c10d/reducer.cpp: a bucket
    is closed once it holds its limit; one dtype each.
    """
    sizes: list[int] = []
    open_buckets: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for parameter in reversed(parameters):
        local = local_tensor(parameter)
        total = open_buckets.get(local.dtype, 0) + local.numel() * local.element_size()
        if total >= limits.get(local.dtype, DDP_FIRST_BUCKET_BYTES):
            sizes.append(total)
            open_buckets[local.dtype] = 0
            limits[local.dtype] = DDP_BUCKET_BYTES
        else:
            open_buckets[local.dtype] = total
    return sizes + [size for size in open_buckets.values() if size]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class LocalGradients:
    """The optimizer's view of distributed parameters: this rank's parts and their gradients.

    Foreach optimizers and clipping take no mixture of plain and distributed tensors, so they are
    given the local parts, on which the same kernels run with the same bytes.

    Args:
        parameters: the trainable parameters.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._pairs = [
            (parameter, local_tensor(parameter))
            for parameter in parameters
            if local_tensor(parameter) is not parameter
        ]

    def hand_over(self) -> None:
        """Give each local part its gradient; one that is still to be summed is, as FSDP does it."""
        for parameter, local in self._pairs:
            grad: Any = parameter.grad
            if grad is None:
                continue
            placements = getattr(parameter, "placements", None)
            if placements is not None and grad.placements != placements:
                with torch.no_grad():
                    grad = parameter.grad = grad.redistribute(placements=placements)
            local.grad = local_tensor(grad)

    def clear(self) -> None:
        """Drop the gradients of the distributed parameters."""
        for parameter, _ in self._pairs:
            parameter.grad = None
