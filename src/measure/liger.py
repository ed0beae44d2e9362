"""A stand-in for Liger-Kernel's fused linear cross entropy, which needs CUDA and Triton.

It allocates what `liger_kernel/ops/fused_linear_cross_entropy.py` of version 0.8.5 allocates with
its defaults, in that order. Its cross-entropy kernel writes the gradient over the logits.

Letters: T tokens of the micro batch, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from src.measure.kernels import HALF

IGNORED = -100


def chunk_size(tokens: int, *, hidden: int, vocab: int) -> int:
    """C: a chunk's logits have about as many elements as the hidden states of all tokens.

    `next_power_of_2(cdiv(T, cdiv(V, D)))`, at most T.
    """
    num_chunks = -(-vocab // hidden)
    return min(1 << (-(-tokens // num_chunks) - 1).bit_length(), tokens)


def _reuses_buffer(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the products write into buffers of their own (`_can_use_mm_out`)."""
    if hidden.dtype is not weight.dtype:
        return False
    device = hidden.device.type
    return not torch.is_autocast_enabled(device) or (
        hidden.dtype is torch.get_autocast_dtype(device)
    )


def _add_weight_gradient(
    weight_gradient: torch.Tensor,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    compute_capability: tuple[int, int],
) -> None:
    """In place by `addmm` from compute capability 8.0 on in half precision; else a sum of two.

    `addmm` with `out=` reads `hidden` in the gradient's dtype and allocates nothing else.
    """
    in_place = weight_gradient.dtype in (torch.float32, logits.dtype) and logits.dtype in HALF
    if in_place and compute_capability >= (8, 0):
        taken = hidden.to(logits.dtype)
        torch.mul(weight_gradient, 1, out=weight_gradient)
        del taken
    else:
        weight_gradient += torch.mm(logits.t(), hidden).float()


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Head and loss in one: the gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        compute_capability: tuple[int, int],
    ) -> torch.Tensor:
        """The mean loss, fp32.

        Args:
            ctx: keeps both gradients.
            hidden: (T, D).
            weight: (V, D), the head's.
            labels: (T,).
            compute_capability: of the GPU.
        """
        tokens, (vocab, width) = hidden.shape[0], weight.shape
        rows = chunk_size(tokens, hidden=width, vocab=vocab)
        gradient = torch.zeros_like(hidden)
        weight_gradient = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        (labels != IGNORED).sum()
        reuses = _reuses_buffer(hidden, weight)
        buffer = hidden.new_empty((rows, vocab)) if reuses else None
        for start in range(0, tokens, rows):
            part = hidden[start : start + rows]
            if buffer is not None:
                logits = buffer[: part.shape[0]]
                torch.mm(part, weight.t(), out=logits)
                torch.mm(logits, weight, out=gradient[start : start + rows])
            else:
                logits = part @ weight.t()
                gradient[start : start + rows] = logits @ weight
            if weight_gradient is not None:
                _add_weight_gradient(weight_gradient, logits, part, compute_capability)
            del logits
        del buffer
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `hidden` and `weight`, scaled in place by the kernel."""
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None, None
