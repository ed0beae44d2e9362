"""FlashAttention-2 for machines without the package: its tensors, through PyTorch's own operator.

`flash_attn_func` keeps q, k, v, the output, the fp32 log-sum-exp and the random state for the
backward pass, with the head size padded to a multiple of 8; PyTorch's `_flash_attention_forward` is
the same kernel and keeps the same tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

aten = torch.ops.aten


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """The package's function; q, k, v are (B, S, heads, head size)."""
    del window_size, softcap, deterministic
    size = q.shape[-1]
    if size % 8:
        q, k, v = (torch.nn.functional.pad(x, (0, 8 - size % 8)) for x in (q, k, v))
    out: torch.Tensor = aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False,
        scale=softmax_scale if softmax_scale is not None else size**-0.5,
    )[0]  # fmt: skip
    return out[..., :size]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Present for its signature; one sequence per row never packs."""
    raise NotImplementedError("packed sequences are not simulated")


def _patches(stack: ExitStack) -> None:
    import transformers.modeling_flash_attention_utils as utils
    from transformers import PreTrainedModel

    def patch(owner: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(owner, name, value))

    check: Callable[..., bool] = PreTrainedModel._flash_attn_can_dispatch

    def can_dispatch(self: Any, *args: Any, **kwargs: Any) -> bool:
        return True if self._supports_flash_attn else check(self, *args, **kwargs)

    def imports(*_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    patch(PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch)
    patch(utils, "_lazy_imports", imports)
    patch(utils, "_loaded_implementation", None)
    patch(utils, "_is_packed_sequence", lambda *_args, **_kwargs: False)
    patch(utils, "is_flash_attn_available", lambda *_args, **_kwargs: True)
    for name, module in list(sys.modules.items()):
        # Imported earlier, without the package: such a module left the function out.
        guarded = name.startswith("transformers.models.") and hasattr(
            module, "is_flash_attn_available"
        )
        if guarded and not hasattr(module, "_flash_attention_forward"):
            vars(module)["_flash_attention_forward"] = utils._flash_attention_forward
    available = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    stack.enter_context(
        mock.patch.dict(available, {"general_availability_check": lambda *_a, **_k: True})
    )


@contextmanager
def simulated_flash_attention() -> Iterator[None]:
    """Within it, transformers finds FlashAttention-2 installed."""
    with ExitStack() as stack:
        _patches(stack)
        yield
