"""Stand-ins for bitsandbytes' quantised Linears: their storages and temporaries, no numbers.

They follow bitsandbytes 0.49 line by line: `nn/modules.py` (`Linear4bit`, `Linear8bitLt`),
`autograd/_functions.py` (`MatMul4Bit`, `MatMul8bitLt`), `functional.py` (`QuantState`,
`dequantize_4bit`), `backends/cuda/ops.py` and `backends/default/ops.py` (the int8 kernels).

Letters: N weights of a Linear, O its outputs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

BLOCK = 64
"""Weights that share a scale (`blocksize`)."""

NESTED_BLOCK = 256
"""Scales that share one, with double quantisation."""

CODE_ENTRIES, NESTED_CODE_ENTRIES = 16, 256
"""Entries of the tables that codes stand for; each Linear has its own."""

OUTLIER_THRESHOLD = 6.0
"""transformers' `llm_int8_threshold`: inputs beyond it would be multiplied in their own dtype."""


class _Packed(nn.Parameter):
    """A frozen parameter that libraries know by the name of its class; kept on the meta device."""

    def __new__(
        cls, data: torch.Tensor, requires_grad: bool = False, **attributes: object
    ) -> _Packed:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.__dict__.update(attributes)
        return made


class Params4bit(_Packed):
    """Packed weights, with `compress_statistics` and `quant_type`."""


class Int8Params(_Packed):
    """int8 weights."""


def _packed(
    kind: type[_Packed], shape: tuple[int, ...], dtype: torch.dtype, **attributes: object
) -> _Packed:
    return kind(torch.empty(shape, dtype=dtype, device="meta"), False, **attributes)


class QuantisedLinear(nn.Linear):
    """What both kinds have in common.

    Attributes:
        num_weights: elements of the weight, however it is stored.
    """

    statistics: tuple[str, ...] = ()

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.num_weights = in_features * out_features
        row = torch.empty(out_features, device="meta")
        self.register_parameter("bias", nn.Parameter(row, False) if bias else None)

    def _keep(self, name: str, size: int, dtype: torch.dtype) -> None:
        # Plain attributes: bitsandbytes keeps them in a state object that FSDP does not see.
        self.__dict__[name] = torch.empty(size, dtype=dtype, device="meta")

    def _cast_bias(self, dtype: torch.dtype) -> None:
        """The bias takes the first input's dtype for good."""
        if self.bias is not None and self.bias.dtype != dtype:
            self.bias.data = self.bias.data.to(dtype)

    def dequantise(self) -> torch.Tensor:
        """The whole weight."""
        raise NotImplementedError


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.tensors = (weight,)
        return nn.functional.linear(tensor, layer.dequantise().to(tensor.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        dense = ctx.layer.dequantise().to(grad.dtype)
        return torch.matmul(grad, dense), None, None, None


class Linear4bit(QuantisedLinear):
    """A Linear in four bits: N/2 bytes, N/64 scales, with double quantisation one byte each.

    Each product dequantises the whole weight first, forward and backward, and keeps only the packed
    one.

    Args:
        input_features, output_features, bias: as of the Linear.
        compute_dtype: dtype of the product; also the one that the weight was loaded in.
        compress_statistics: whether the scales are quantised too.
        quant_type: `nf4`.
        quant_storage: dtype that the packed bytes are stored as; FSDP shards half-precision ones.
    """

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        compress_statistics: bool = True,
        quant_type: str = "nf4",
        quant_storage: torch.dtype = torch.uint8,
    ) -> None:
        super().__init__(input_features, output_features, bias)
        self.compute_dtype = compute_dtype
        elements = (self.num_weights + 1) // (2 * quant_storage.itemsize)
        self.weight = _packed(
            Params4bit,
            (elements, 1),
            quant_storage,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
        )
        self.nested = compress_statistics
        scales = -(-self.num_weights // BLOCK)
        self._keep("code", CODE_ENTRIES, torch.float32)
        self._keep("absmax", scales, torch.uint8 if compress_statistics else torch.float32)
        if compress_statistics:
            self._keep("nested_absmax", -(-scales // NESTED_BLOCK), torch.float32)
            self._keep("nested_code", NESTED_CODE_ENTRIES, torch.float32)
            self._keep("offset", 1, torch.float32)

    def dequantise(self) -> torch.Tensor:
        """In the dtype that it was loaded in; nested scales are fp32 for the time of the kernel."""
        state = vars(self)
        scales = state["absmax"]
        maxima = torch.empty(scales.shape, device=scales.device) if self.nested else scales
        shape = (self.out_features, self.in_features)
        weight = torch.empty(shape, dtype=self.compute_dtype, device=scales.device)
        del maxima
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """The product in the compute dtype, the result in the input's."""
        self._cast_bias(input.dtype)
        tensor = input.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out: torch.Tensor = _MatMul4Bit.apply(tensor, self.weight, bias, self)  # type: ignore[no-untyped-call]
        return out.to(input.dtype)


def _quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`int8_vectorwise_quant` of fp16 rows: int8 ones, a scale each; outliers are looked for."""
    statistics = torch.empty(rows.shape[:-1].numel(), device=rows.device)
    quantised = torch.empty_like(rows, dtype=torch.int8)
    is_outlier = rows.abs() >= OUTLIER_THRESHOLD
    del is_outlier
    return quantised, statistics


def _multiply_int8(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """`int8_scaled_mm`: an int32 product, dequantised into fp16, then cast."""
    if rows.dim() not in (2, 3):
        raise RuntimeError("Only two or three dimensional matrices are supported for argument A")
    shape = (*rows.shape[:-1], weight.shape[0])
    product = torch.empty(shape, dtype=torch.int32, device=rows.device)
    out = torch.empty_like(product, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype)


class _MatMul8bitLt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Any
    ) -> torch.Tensor:
        shape = tensor.shape
        if tensor.dim() == 3:
            tensor = tensor.reshape(-1, shape[-1])
        rows, statistics = _quantise_rows(tensor.to(torch.float16))
        output = _multiply_int8(rows, weight, bias, tensor.dtype)
        ctx.layer, ctx.shape, ctx.dtype = layer, shape, tensor.dtype
        # Attributes, not saved tensors: checkpointing without reentry does not drop them.
        ctx.tensors = (tensor,) if any(ctx.needs_input_grad[:2]) else None
        del statistics
        return output.reshape(*shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        if grad.dim() == 3:
            grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        state = vars(ctx.layer)
        dense = ctx.layer.weight.to(ctx.dtype, copy=True)
        dense.mul_(state["SCB"].unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(ctx.dtype), dense).view(ctx.shape), None, None, None


class Linear8bitLt(QuantisedLinear):
    """A Linear in int8 (LLM.int8()): N bytes and an fp32 scale for each of its O rows.

    The input is quantised row by row for an int8 product, and kept; the backward pass dequantises
    the whole weight into the input's dtype.

    Args:
        input_features, output_features, bias: as of the Linear.
        has_fp16_weights: False: the weight is stored in int8 alone.
        threshold: see `OUTLIER_THRESHOLD`; no input is taken to be beyond it.
        index: bitsandbytes' own; unused.
    """

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = False,
        threshold: float = OUTLIER_THRESHOLD,
        index: object = None,
    ) -> None:
        super().__init__(input_features, output_features, bias)
        self.index = index
        self.state = SimpleNamespace(has_fp16_weights=has_fp16_weights, threshold=threshold)
        self.weight = _packed(Int8Params, (output_features, input_features), torch.int8)
        self._keep("SCB", output_features, torch.float32)

    def dequantise(self) -> torch.Tensor:
        """In fp32 (`int8_vectorwise_dequant`: two products)."""
        scales = vars(self)["SCB"]
        weight: torch.Tensor = self.weight * scales.view(-1, 1) * 7.874015718698502e-3
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """The product in int8, the result in the input's dtype."""
        self._cast_bias(input.dtype)
        out: torch.Tensor = _MatMul8bitLt.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return out


def num_elements(module: nn.Module, name: str, parameter: torch.Tensor) -> int:
    """Elements of a module's own parameter as the model counts them, packed or not."""
    if isinstance(module, QuantisedLinear) and name == "weight":
        return module.num_weights
    return parameter.numel()
