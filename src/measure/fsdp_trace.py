"""Follow `fully_shard`: storages that it frees by resizing, and whose bytes its tensors hold."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from src.measure.events import Owner
from src.measure.trace import Trace


def _owned(trace: Trace, owner: Owner, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with every storage that it makes owned by `owner`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before, trace.default_owner = trace.default_owner, owner
        try:
            return function(*args, **kwargs)
        finally:
            trace.default_owner = before

    return call


def _resizing(trace: Trace) -> Callable[..., Any]:
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = original(storage, num_bytes)
        trace.resized(storage, num_bytes)
        return result

    return resize


def _with_gradient_hook(trace: Trace, function: Callable[..., Any]) -> Callable[..., Any]:
    """Own the gradient of a gathered parameter, which exists until its reduction."""

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            trace.own([getattr(parameter.grad, "_local_tensor", parameter.grad)], Owner.GRADIENTS)

    def call(fsdp_parameter: Any) -> None:
        is_first = not hasattr(fsdp_parameter, "_unsharded_param")
        function(fsdp_parameter)
        parameter = fsdp_parameter._unsharded_param
        if is_first and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(accumulated)

    return call


def _real_meshes() -> list[tuple[Any, str, Any]]:
    """Device meshes compute with real tensors of ranks, also where two of them are joined."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    mesh = vars(DeviceMesh)["mesh"]
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    found: list[tuple[Any, str, Any]] = [(DeviceMesh, "mesh", property(outside(mesh.fget)))]
    if concatenate is not None:
        found.append((DeviceMesh, "_concatenate", staticmethod(outside(concatenate))))
    return found


@contextmanager
def following_fsdp(trace: Trace) -> Iterator[None]:
    """Within it, `trace` sees what `fully_shard` gathers, frees and sends."""
    package = "torch.distributed.fsdp._fully_shard"
    parameter = importlib.import_module(f"{package}._fsdp_param").FSDPParam
    collectives = importlib.import_module(f"{package}._fsdp_collectives")
    flat = importlib.import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
    flat_module = importlib.import_module("torch.distributed.fsdp._flat_param")
    runtime = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    buffers = Owner.COMMUNICATION_BUFFERS
    replacements: list[tuple[Any, str, Any]] = [
        *_real_meshes(),
        (flat_module, "_no_dispatch_record_stream", trace.note_use),
        (runtime, "_no_dispatch_record_stream", trace.note_use),
        (
            flat,
            "init_flat_param_attributes",
            _owned(trace, Owner.GATHERED_WEIGHTS, flat.init_flat_param_attributes),
        ),
        (torch.UntypedStorage, "resize_", _resizing(trace)),
        (
            parameter,
            "init_all_gather_outputs",
            _owned(trace, Owner.GATHERED_WEIGHTS, parameter.init_all_gather_outputs),
        ),
        (
            parameter,
            "init_unsharded_param",
            _with_gradient_hook(trace, parameter.init_unsharded_param),
        ),
        (
            collectives.DefaultAllGather,
            "allocate",
            _owned(trace, buffers, collectives.DefaultAllGather.allocate),
        ),
        (
            collectives.DefaultReduceScatter,
            "allocate",
            _owned(trace, buffers, collectives.DefaultReduceScatter.allocate),
        ),
    ]
    with ExitStack() as stack:
        for owner, name, function in replacements:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
