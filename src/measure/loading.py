"""Bytes that exist only while the weights arrive, and what the allocator caches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from src.measure.events import Owner
from src.measure.quantised import BLOCK, Linear4bit, Linear8bitLt
from src.measure.trace import Trace

HALF_BYTES = 2


def flat_parameters(model: nn.Module) -> dict[int, Any]:
    """FSDP1's units: identity of the module that was wrapped -> its flat parameter."""
    found: dict[int, Any] = {}
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None)
        wrapped: Any = getattr(module, "_fsdp_wrapped_module", None)
        if handle is not None and wrapped is not None:
            found[id(wrapped)] = handle.flat_param
    return found


def transient_bytes(module: nn.Module, flat: Any) -> list[int]:
    """Sizes of the blocks that live while the tensors of `module` itself are put on the GPU.

    FSDP1 moves the parameters of a unit to the GPU, concatenates them and keeps its shard of that
    (`_init_param_handle_from_module`, torch/distributed/fsdp/_init_utils.py). bitsandbytes moves a
    weight there and packs it; scales that are quantised too are fp32 first
    (`Params4bit._quantize`), and what becomes int8 is fp16 (`Int8Params._quantize`).

    Args:
        module: a module of the model.
        flat: FSDP1's flat parameter where the module is a unit, else None.
    """
    if flat is not None:
        counts = [torch.Size(shape).numel() for shape in flat._shapes]
        return [count * flat.element_size() for count in (*counts, sum(counts))]
    if isinstance(module, Linear4bit):
        scales = -(-module.num_weights // BLOCK)
        return [
            module.num_weights * module.compute_dtype.itemsize,
            scales * torch.float32.itemsize * module.nested,
        ]
    if isinstance(module, Linear8bitLt):
        return [module.num_weights * HALF_BYTES]
    return []


@contextmanager
def loading(trace: Trace, sizes: Sequence[int], *, flat: Any, layer: int) -> Iterator[None]:
    """Within it, weights are put on the GPU while blocks of `sizes` are alive."""
    blocks = [trace.born(size, Owner.TEMPORARIES, layer=layer) for size in sizes if size]
    if flat is not None:
        trace.follow(flat, Owner.WEIGHTS, layer=layer)
    yield
    for block in blocks:
        trace.freed(block)
