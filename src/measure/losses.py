"""Losses other than that of the installed transformers: of its last generation, chunked, fused.

Letters: T tokens of the micro batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from src.architecture.losses import UPCASTS_4X, Upcast4x, check_loss
from src.measure.liger import FusedLinearCrossEntropy
from src.spec import Job, Loss

NUM_CHUNKS = 8
"""Runs of tokens that the chunked loss is computed on, one after the other."""

IGNORED = -100
"""The label of a token without a successor."""


def install_loss(model: Any, job: Job, *, compute_capability: tuple[int, int]) -> None:
    """Give `model` the loss of `job`; in place, before adapters and wrappers.

    Raises:
        NotCoveredError: the family has no such loss.
    """
    check_loss(job.model.model_type, job.loss)
    if job.loss is Loss.STANDARD_4X:
        _Loss4x(UPCASTS_4X[job.model.model_type]).install(model)
    elif job.loss is Loss.CHUNKED:
        model.forward = _headless_forward(model, partial(_chunked_loss, model))
    elif job.loss is Loss.LIGER:
        model.forward = _headless_forward(model, partial(_liger_loss, model, compute_capability))


class _Loss4x:
    """transformers 4.48's loss: `ForCausalLMLoss`, or what a family's `forward` had of its own.

    Args:
        upcast: what it does with the logits.
    """

    def __init__(self, upcast: Upcast4x) -> None:
        self.upcast = upcast
        self.hidden_dtype = torch.float32

    def install(self, model: Any) -> None:
        """Let `model` compute its loss so; its logits are fp32 from the head on where they were."""
        model.loss_function = self
        if self.upcast in (Upcast4x.IN_PLACE, Upcast4x.ROUND_TRIP):
            model.get_output_embeddings().register_forward_hook(self._raise)

    def _raise(
        self, _head: nn.Module, inputs: tuple[torch.Tensor], logits: torch.Tensor
    ) -> torch.Tensor:
        self.hidden_dtype = inputs[0].dtype
        return logits.float()

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any
    ) -> torch.Tensor:
        """Cross entropy of a shifted copy of the logits, which lives as long as this call."""
        if self.upcast is Upcast4x.COPY:
            logits = logits.float()
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss = functional.cross_entropy(shift_logits.view(-1, vocab_size), shift_labels.view(-1))
        if self.upcast is Upcast4x.ROUND_TRIP:
            logits.to(self.hidden_dtype)
        return loss


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Each token's successor, as one row; the last of a sequence has none."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)


def _headless_forward(
    model: Any, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """The model's `forward` with head and loss in one; it returns no logits.

    Args:
        model: a causal language model.
        loss: of the hidden states before the head, (T, D), and the tokens that follow, (T,).
    """
    from transformers.modeling_outputs import CausalLMOutput

    body = getattr(model, model.base_model_prefix)

    def forward(*args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        hidden = body(*args, **kwargs)[0]
        return CausalLMOutput(loss=loss(hidden.view(-1, hidden.shape[-1]), _shifted(labels)))

    return forward


def _logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The family's logits of hidden states: head, then what scales or caps them."""
    head = model.cls if hasattr(model, "cls") else model.get_output_embeddings()
    logits: torch.Tensor = head(hidden)
    scaling = getattr(model.config, "logits_scaling", None)
    if scaling is not None:
        logits = logits / scaling
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = logits / cap
        logits = torch.tanh(logits)
        logits = logits * cap
    return logits


def _chunk_loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        _logits(model, hidden).float(), labels, ignore_index=IGNORED, reduction="sum"
    )


def _chunked_loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logits and fp32 loss of one chunk at a time, recomputed in the backward pass."""
    pairs = zip(hidden.chunk(NUM_CHUNKS), labels.chunk(NUM_CHUNKS), strict=True)
    losses: list[torch.Tensor] = [
        checkpoint(
            partial(_chunk_loss, model), *pair, use_reentrant=False, preserve_rng_state=False
        )
        for pair in pairs
    ]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


def _liger_loss(
    model: Any, compute_capability: tuple[int, int], hidden: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    head: nn.Module = model.get_output_embeddings()
    loss: torch.Tensor = FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, labels, compute_capability
    )
    return loss
