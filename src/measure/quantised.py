"""A stand-in for bitsandbytes' NF4 Linears: the same storages and temporaries, no numbers.

Four-bit weights with double quantisation (blocks of 64, blocks of 256 of their maxima): N/2 + N/64
+ N/16384*4 bytes for N weights. Each product dequantises the whole weight into the compute dtype
first, forward and backward (`bitsandbytes.autograd._functions.MatMul4Bit`), and saves only the
four-bit one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BLOCK = 64
NESTED_BLOCK = 256


def _dequantise(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight; the blocks' maxima become fp32 for the time of the kernel."""
    maxima = torch.empty(layer.absmax.numel(), dtype=torch.float32, device=layer.absmax.device)
    weight = torch.empty(
        (layer.out_features, layer.in_features), dtype=dtype, device=layer.absmax.device
    )
    del maxima
    return weight


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        dense = _dequantise(layer, layer.compute_dtype).to(tensor.dtype)
        return nn.functional.linear(tensor, dense, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        dense = _dequantise(ctx.layer, ctx.layer.compute_dtype).to(grad.dtype)
        return torch.matmul(grad, dense), None, None, None


class Nf4Linear(nn.Linear):
    """A Linear whose weight is stored in four bits.

    Args:
        linear: the Linear, on the meta device.
        compute_dtype: dtype of the dequantised weight.
        storage_dtype: dtype that the packed bytes are stored as; FSDP shards bf16, not bytes.
    """

    def __init__(
        self, linear: nn.Linear, *, compute_dtype: torch.dtype, storage_dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = compute_dtype
        count = linear.weight.numel()
        packed = torch.empty(
            (count // 2 // storage_dtype.itemsize, 1), dtype=storage_dtype, device="meta"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.is_quantized_4bit = True  # type: ignore[attr-defined]
        self.bias = linear.bias
        maxima = math.ceil(count / BLOCK)
        for name, size, dtype in (
            ("absmax", maxima, torch.uint8),
            ("nested_absmax", math.ceil(maxima / NESTED_BLOCK), torch.float32),
            ("code", 16, torch.float32),
            ("offset", 1, torch.float32),
        ):
            buffer = torch.empty(size, dtype=dtype, device="meta")
            # Plain attributes: bitsandbytes keeps them in a state object that FSDP does not see.
            self.__dict__[name] = buffer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """The product in the compute dtype, the result in the input's."""
        dtype = input.dtype
        tensor = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out: torch.Tensor = _MatMul4Bit.apply(tensor, self.weight, bias, self)  # type: ignore[no-untyped-call]
        return out.to(dtype)


def quantise(model: Any, *, compute_dtype: torch.dtype, storage_dtype: torch.dtype) -> None:
    """Replace every Linear but the head by its four-bit stand-in, in place (on the meta device)."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                stand_in = Nf4Linear(
                    child, compute_dtype=compute_dtype, storage_dtype=storage_dtype
                )
                setattr(module, name, stand_in)


def adapt_like_bitsandbytes(model: nn.Module) -> None:
    """Give adapters of four-bit Linears the forward pass of `peft.tuners.lora.bnb.Linear4bit`."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, Nf4Linear) and hasattr(module, "lora_A"):
            vars(module)["forward"] = _adapted_forward(module)


def _adapted_forward(layer: Any) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = layer.base_layer(x, *args, **kwargs).clone()
        for name in layer.active_adapters:
            first, second = layer.lora_A[name], layer.lora_B[name]
            converts = not torch.is_autocast_enabled()
            expected = result.dtype
            operand = x.to(first.weight.dtype) if converts else x
            output = second(first(layer.lora_dropout[name](operand))) * layer.scaling[name]
            result = result + (output.to(expected) if converts else output)
        return result

    return forward
