"""`FullyShardedDataParallel` (FSDP1) as accelerate configures it for the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from src.measure.build import autocast_dtype
from src.measure.case import Case


def wrap_fsdp1(model: nn.Module, blocks: list[nn.Module], case: Case, mesh: Any) -> nn.Module:
    """Each block a unit, trainable leaf modules of an adapted model units of their own.

    Full sharding, the next unit gathered before the backward pass of the current one, original
    parameters kept (accelerate's defaults; PEFT's `fsdp_auto_wrap_policy` for adapters). Under
    autocast the computation and the reduction are half precision.
    """
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision

    chosen = {id(block) for block in blocks}
    adapts = case.step.job.finetune.is_lora

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or id(module) in chosen or (adapts and _is_trainable_leaf(module))

    half = torch.bfloat16 if case.loop.autocast_half_weights else None
    dtype = autocast_dtype(case.step.job.precision) or half
    mixed = None
    if dtype is not None:
        reduce = torch.float32 if case.step.job.fp32_reduce else dtype
        mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce, buffer_dtype=dtype)
    wrapped: nn.Module = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=mixed,
        device_id=next(model.parameters()).device,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    return wrapped


def _is_trainable_leaf(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        next(module.children(), None) is None
        and isinstance(weight, nn.Parameter)
        and weight.requires_grad
    )
