"""Which attention kernel CUDA runs, and the bytes that kernels take besides their results.

Letters: B batch, H heads, S queries, K keys, D head size, V vocabulary.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

aten = torch.ops.aten

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""`:4096:2:16:8`, one per handle and stream before Hopper (ATen/cuda/CublasHandlePool.cpp)."""

CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * 1024 * 1024
"""`:4096:8` KiB x 1024 from compute capability 9.0 on (the same file)."""

SORTED_EMBEDDING_INDICES = 3072
"""With more indices the embedding's backward sorts them (aten/native/cuda/Embedding.cu)."""

DISTINCT_TOKEN_FRACTION = 0.2
"""Assumed share of distinct tokens in a batch: partial sums of the embedding's backward."""

HALF = (torch.float16, torch.bfloat16)


class SdpaKernel(StrEnum):
    """The kernels behind `scaled_dot_product_attention`."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose_sdpa_kernel(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    has_mask: bool,
    enable_gqa: bool,
    compute_capability: tuple[int, int],
) -> SdpaKernel:
    """The kernel that PyTorch picks on CUDA (aten/native/transformers/cuda/sdp_utils.cpp).

    Both fused kernels want as many key as query heads, unless grouping is asked for, which falcon
    does not. Flash: half precision, no mask, equal head sizes up to 256, compute capability 8.0.
    Memory efficient: any of the three dtypes (bf16 from 8.0 on), no grouped heads. Otherwise the
    composite. cuDNN's kernel, which recent versions prefer on Hopper, keeps the same tensors as
    flash.
    """
    ampere = compute_capability >= (8, 0)
    half = query.dtype in HALF
    same_head_size = query.shape[-1] == value.shape[-1]
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return SdpaKernel.MATH
    if half and ampere and not has_mask and same_head_size and query.shape[-1] <= 256:
        return SdpaKernel.FLASH
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    if grouped or (query.dtype is torch.bfloat16 and not ampere):
        return SdpaKernel.MATH
    return SdpaKernel.EFFICIENT


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward_bytes(query: torch.Tensor, key: torch.Tensor, *, heads_dim: int) -> int:
    """fp32 `B*H*S128` row sums and `B*H*S128*D32` accumulator; under GQA dk and dv of all heads.

    Source: flash_api.cpp, `mha_bwd`: `softmax_d`, `dq_accum`, `dk_expanded`, `dv_expanded`.
    """
    batch, heads, dim = query.shape[0], query.shape[heads_dim], query.shape[-1]
    seq = query.shape[3 - heads_dim]
    rows = batch * heads * _round_up(seq, 128)
    total = rows * 4 + rows * _round_up(dim, 32) * 4
    if key.shape[heads_dim] != heads:
        keys = key.shape[3 - heads_dim]
        total += 2 * batch * keys * heads * dim * query.element_size()
    return total


def _embedding_backward_bytes(indices: torch.Tensor, hidden: int) -> int:
    """Sorted and original indices, the sort's own buffers, segment offsets and fp32 partial sums.

    Source: aten/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu. The partial sums have one row
    for each distinct token (more for tokens that occur more than ten times).
    """
    count = indices.numel()
    if count <= SORTED_EMBEDDING_INDICES:
        return 0
    distinct = int(count * DISTINCT_TOKEN_FRACTION)
    return 5 * count * 8 + distinct * hidden * 4


_MATRIX_OPERATORS = frozenset(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
)


class KernelWorkspace:
    """Workspace rule of one process on one kind of GPU; remembers which cuBLAS handles exist.

    Args:
        compute_capability: (major, minor).
    """

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        hopper = compute_capability >= (9, 0)
        self.cublas_bytes = CUBLAS_WORKSPACE_HOPPER_BYTES if hopper else CUBLAS_WORKSPACE_BYTES
        self._handles: set[bool] = set()

    def __call__(
        self, func: Any, args: tuple[Any, ...], result: Any, in_backward: bool
    ) -> tuple[int, int]:
        """Bytes during the operator, bytes from it on (one cuBLAS handle for each thread)."""
        if func in _MATRIX_OPERATORS:
            if in_backward in self._handles:
                return 0, 0
            self._handles.add(in_backward)
            return 0, self.cublas_bytes
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            return _flash_backward_bytes(args[1], args[2], heads_dim=1), 0
        if func is aten._flash_attention_backward.default:
            return _flash_backward_bytes(args[1], args[2], heads_dim=2), 0
        if func is aten._scaled_dot_product_efficient_attention_backward.default:
            query = args[1]
            return query.shape[0] * query.shape[1] * query.shape[2] * 4, 0
        if func is aten.embedding_dense_backward.default:
            return _embedding_backward_bytes(args[1], result.shape[-1]), 0
        return 0, 0


def run_as_cuda(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, num_experts: int = 0
) -> Any:
    """An operator's results as CUDA returns them.

    Layer norm keeps mean and rstd in fp32; `_grouped_mm` takes fp32 and fp16 as well, which its
    fake implementation refuses; which tokens an expert gets is asked by `nonzero`.
    """
    if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    if func is aten.nonzero.default and num_experts:
        # Which tokens an expert gets: as many as every other one.
        count = max(args[0].numel() // num_experts, 1)
        return torch.empty((count, args[0].dim()), dtype=torch.int64, device=args[0].device)
    result = func(*args, **kwargs)
    if func is aten.native_layer_norm.default and result[1].dtype in HALF:
        out, mean, rstd = result
        mean, rstd = (torch.empty_like(x, dtype=torch.float32) for x in (mean, rstd))
        return out, mean, rstd
    return result


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """An empty result: (rows, columns), or one matrix for each group if both operands are 2-D."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        assert offsets is not None, "two flat operands are grouped by offsets"
        shape.insert(0, offsets.shape[0])
    return torch.empty(shape, dtype=left.dtype, device=left.device)
