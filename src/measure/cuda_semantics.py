"""Give fake CPU tensors the operator semantics of CUDA: dropout, softmax, attention, autocast.

Kernels are registered with PyTorch's dispatcher for the CPU keys and taken back afterwards, so that
calls from Python, from C++ and from a recomputation during `backward()` all see the same thing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from src.measure.kernels import HALF, SdpaKernel, choose_sdpa_kernel

aten = torch.ops.aten

_FP32_OPERATORS = (
    "layer_norm", "native_layer_norm", "group_norm", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "rsqrt", "reciprocal", "exp", "expm1", "log", "log10", "log1p", "log2",
    "softplus", "nll_loss", "nll_loss_nd", "logsumexp", "cosine_similarity",
    "binary_cross_entropy_with_logits", "mse_loss", "kl_div", "dist", "tan", "sinh", "cosh", "acos",
    "asin", "rms_norm", "l1_loss", "smooth_l1_loss", "huber_loss", "erfinv",
)  # fmt: skip
"""Run in fp32 under CUDA autocast (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32)."""

_FP32_RESULT_OPERATORS = (
    "sum", "sum.dim_IntList", "cumsum", "cumprod", "prod", "prod.dim_int", "softmax.int",
    "log_softmax.int", "linalg_vector_norm",
)  # fmt: skip
"""The same, through their `dtype` argument: no fp32 copy of the input is made."""

_CPU_ONLY_OPERATORS = ("cat", "stack", "index_copy", "cross_entropy_loss")
"""CPU autocast widens the inputs of these; CUDA autocast leaves them alone."""


def _half_to_float(dtype: torch.dtype | None, tensor: torch.Tensor) -> bool:
    return dtype is torch.float32 and tensor.dtype in HALF


def _softmax(operator: Callable[..., Any]) -> Callable[..., Any]:
    """`softmax(x, dim, dtype)` with CUDA's fused conversion from half precision."""

    def kernel(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if _half_to_float(dtype, tensor):
            return operator(tensor, dim, True)
        return operator(tensor if dtype is None else tensor.to(dtype), dim, False)

    return kernel


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The fused dropout of CUDA: it saves a one-byte mask."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    result: torch.Tensor = torch.native_dropout(tensor, p, train)[0]
    return result


def _attention(compute_capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention` as CUDA dispatches it (aten/native/transformers)."""

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        chosen = choose_sdpa_kernel(
            query=query,
            key=key,
            value=value,
            has_mask=attn_mask is not None,
            enable_gqa=enable_gqa,
            compute_capability=compute_capability,
        )
        if chosen is SdpaKernel.MATH:
            math_result: torch.Tensor = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )[0]  # fmt: skip
            return math_result
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if chosen is SdpaKernel.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        bias = _efficient_bias(attn_mask, query, key)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        result: torch.Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return result

    return kernel


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    size = query.shape[-1]
    if size % 8:
        padding = (0, 8 - size % 8)
        query, key, value = (torch.nn.functional.pad(x, padding) for x in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size] if size % 8 else out


def _efficient_bias(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """The mask in the compute dtype, its last dimension padded to 16, expanded over the heads."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    keys = mask.shape[-1]
    if keys % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - keys % 16))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _outside_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF:
        return value.to(torch.float32)
    return value


def _in_fp32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _outside_autocast():
            return operator(*tree_map(_widen, args), **tree_map(_widen, kwargs))

    return kernel


def _with_fp32_result(operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and args[0].dtype in HALF:
            args, kwargs = args[:position], kwargs | {"dtype": torch.float32}
        with _outside_autocast():
            return operator(*args, **kwargs)

    return kernel


@contextmanager
def cuda_semantics(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Within it, operators on (fake) CPU tensors do what CUDA of that compute capability does."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def register(name: str, kernel: Any, key: str) -> None:
        library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            register("softmax.int", _softmax(aten._softmax), "AutogradCPU")
            register("log_softmax.int", _softmax(aten._log_softmax), "AutogradCPU")
            register("dropout", _dropout, "AutogradCPU")
            register("scaled_dot_product_attention", _attention(compute_capability), "AutogradCPU")
            for name in _FP32_OPERATORS:
                register(name, _in_fp32(_operator(name)), "AutocastCPU")
            for name in _FP32_RESULT_OPERATORS:
                register(name, _with_fp32_result(_operator(name)), "AutocastCPU")
            for name in _CPU_ONLY_OPERATORS:
                register(name, torch.library.fallthrough_kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
