"""Both sides of a step of DeepSpeed's engine: what lies on the GPU, and what on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from src.measure.events import Owner
from src.measure.trace import Block, Recorder, Trace

aten = torch.ops.aten

PINNED = Owner.COMMUNICATION_BUFFERS
"""Owner of page-locked bytes within the host's trace."""


class SidedTrace(Trace):
    """A trace of one side that leaves alone what is known on the other."""

    other: SidedTrace

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[int, str] = {}

    def follow(
        self, tensor: torch.Tensor, owner: Owner | None = None, *, layer: int | None = None
    ) -> None:
        """As `Trace.follow`, on this side alone."""
        if tensor.device.type != "meta" and not self.other.knows(tensor):
            super().follow(tensor, owner, layer=layer)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` lives here."""
        return tensor.untyped_storage()._cdata in self._live

    def born(
        self, num_bytes: int, owner: Owner | None = None, *, layer: int | None = None
    ) -> Block:
        """As `Trace.born`, with the line of the engine that asked for it."""
        block = super().born(num_bytes, owner, layer=layer)
        self.sites[block.number] = site()
        return block


def _engine_frame() -> FrameType | None:
    """The engine's frame that calls an operator; None where the model or autograd does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/deepspeed/" in name:
            return frame
        if "/transformers/" in name or "/peft/" in name:
            return None
        if frame.f_code.co_name == "_engine_run_backward":
            return None
        frame = frame.f_back
    return None


def site() -> str:
    """Function and line of the engine that is at work; `model` outside it."""
    frame = _engine_frame()
    if frame is None:
        return "model"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


class EngineRecorder(Recorder):
    """Follows both sides, and answers what the engine reads back from tensors."""

    def __init__(self, gpu: SidedTrace, host: SidedTrace, recorder: Recorder) -> None:
        super().__init__(gpu, workspace=recorder.workspace, call=recorder.call)
        self.gpu, self.host = gpu, host
        self.forced: SidedTrace | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is aten._local_scalar_dense.default and _engine_frame() is not None:
            # Losses and norms are finite: nothing overflows.
            return 1.0 if args[0].dtype.is_floating_point else 0
        kwargs = dict(kwargs or {})
        side = self._side(args, kwargs)
        if kwargs.get("device") is not None and kwargs["device"].type == "cpu":
            kwargs["device"] = torch.device("cpu")
        self.trace = side
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.trace = self.gpu

    def _side(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SidedTrace:
        if self.forced is not None:
            return self.forced
        device = kwargs.get("device")
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        if device is not None and not tensors:
            named_host = device.index is None and _engine_frame() is not None
            return self.host if named_host else self.gpu
        if tensors and all(self.host.knows(tensor) for tensor in tensors):
            return self.host
        if device is not None and device.index is None and _named_host(device):
            return self.host
        return self.gpu

    @contextmanager
    def on(self, side: SidedTrace) -> Iterator[None]:
        """Within it, whatever is allocated lies on that side."""
        before, self.forced = self.forced, side
        try:
            yield
        finally:
            self.forced = before

    def moved(self, tensor: torch.Tensor, to: SidedTrace, dtype: torch.dtype) -> torch.Tensor:
        """`tensor` on the other side; itself where it is there already."""
        there = to.knows(tensor) or (to is self.gpu and not self.host.knows(tensor))
        if there and dtype == tensor.dtype:
            return tensor
        with self.on(to):
            return aten._to_copy(tensor, dtype=dtype)

    def pinned(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """A page-locked copy."""
        with self.on(self.host):
            copy = aten.empty_like(tensor)
        self.host.own([copy], PINNED)
        return copy

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`, which does nothing between two names of one device."""
        device = kwargs.get("device", args[0] if args else None)
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        named = isinstance(device, str | torch.device)
        if not named or tensor.is_meta or _engine_frame() is None:
            return _TENSOR_TO(tensor, *args, **kwargs)
        is_host = isinstance(device, str) and str(getattr(device, "value", device)) == "cpu"
        side = self.host if is_host else self.gpu
        return self.moved(tensor, side, dtypes[0] if dtypes else tensor.dtype)


_TENSOR_TO = torch.Tensor.to


def _named_host(device: torch.device) -> bool:
    return device.type == "cpu" and device.index is None and _engine_frame() is not None
