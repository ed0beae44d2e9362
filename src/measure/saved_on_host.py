"""Tensors saved for the backward pass that wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from src.measure.extend import template
from src.measure.trace import NO_LAYER, Trace


class SavedOnHost:
    """`torch.autograd.graph.save_on_cpu` for a simulated device, whose tensors are the host's.

    As in PyTorch, every tensor that a node saves is copied, parameters among them, once for each
    node that saves it; nodes of checkpointed functions save nothing, their positional inputs are
    saved instead. The backward pass makes a new tensor on the device for each copy.

    Args:
        trace: the record, which host memory is left out of.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._copied: list[tuple[int, int]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around a forward pass."""
        self._copied.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._trace.on_host():
            copy = torch.empty(tensor.size(), dtype=tensor.dtype)
            copy.copy_(tensor)
        self._copied.append((self._trace.layer, copy.numel() * copy.element_size()))
        return copy

    def _unpack(self, copy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(copy)

    def num_bytes(self, depth: int) -> int:
        """Bytes that the last forward pass has copied.

        Args:
            depth: blocks of the model that the run stands for; 0 for the run's own.
        """
        by_layer: dict[int, int] = {}
        for layer, size in self._copied:
            by_layer[layer] = by_layer.get(layer, 0) + size
        if not depth:
            return sum(by_layer.values())
        deep = (by_layer.get(template(layer, depth), 0) for layer in range(depth))
        return by_layer.get(NO_LAYER, 0) + sum(deep)
