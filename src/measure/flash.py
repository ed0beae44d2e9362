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
    return out[..., :size] if size % 8 else out


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


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, value) of what makes transformers 5 find the package."""
    import transformers.modeling_flash_attention_utils as utils
    from transformers import PreTrainedModel

    check: Callable[..., bool] = PreTrainedModel._flash_attn_can_dispatch

    def can_dispatch(self: Any, *args: Any, **kwargs: Any) -> bool:
        return True if self._supports_flash_attn else check(self, *args, **kwargs)

    def imports(*_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    yield PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch
    yield utils, "_lazy_imports", imports
    yield utils, "_loaded_implementation", None
    yield utils, "_is_packed_sequence", _no
    yield utils, "is_flash_attn_available", _yes


def _replacements_of_4() -> Iterator[tuple[Any, str, Any]]:
    """The same for transformers 4, whose modules import the package when they are imported."""
    import transformers.modeling_flash_attention_utils as utils
    import transformers.utils as transformers_utils
    from transformers import PreTrainedModel

    def enable(_cls: Any, config: Any, *_args: Any, **_kwargs: Any) -> Any:
        config._attn_implementation = "flash_attention_2"
        return config

    yield PreTrainedModel, "_check_and_enable_flash_attn_2", classmethod(enable)
    yield utils, "flash_attn_func", flash_attn_func
    yield utils, "flash_attn_varlen_func", flash_attn_varlen_func
    yield utils, "_flash_supports_window_size", True
    yield transformers_utils, "is_flash_attn_2_available", _yes


def _yes(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _no(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _complete_modules() -> None:
    """Give the function to model modules that were imported without the package."""
    import transformers.modeling_flash_attention_utils as utils

    for name, module in list(sys.modules.items()):
        guarded = name.startswith("transformers.models.") and (
            hasattr(module, "is_flash_attn_available")
            or hasattr(module, "is_flash_attn_2_available")
        )
        if guarded and not hasattr(module, "_flash_attention_forward"):
            vars(module)["_flash_attention_forward"] = utils._flash_attention_forward


@contextmanager
def simulated_flash_attention() -> Iterator[None]:
    """Within it, transformers finds FlashAttention-2 installed."""
    import transformers.modeling_flash_attention_utils as utils

    matrix = getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    with ExitStack() as stack:
        for owner, name, value in _replacements() if matrix else _replacements_of_4():
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        if matrix:
            entry = {"general_availability_check": _yes}
            stack.enter_context(mock.patch.dict(matrix[2], entry))
        _complete_modules()
        yield
