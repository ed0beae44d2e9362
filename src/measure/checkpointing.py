"""Which parts of a model run again in the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from src.errors import NotCoveredError, UserError
from src.measure.blocks import find_blocks
from src.measure.options import LoopOptions
from src.spec import Checkpointing, Job


def enable_checkpointing(model: Any, job: Job, loop: LoopOptions) -> None:
    """Recompute blocks, or their attention modules, in the backward pass.

    The random-number state is not kept: that state lives on the host.

    Raises:
        UserError: the model has no checkpointing.
    """
    if job.checkpointing is Checkpointing.FULL:
        _checkpoint_blocks(model, job, loop)
    elif job.checkpointing is Checkpointing.SELECTIVE:
        for block in find_blocks(model):
            module = attention_module(block)
            module.forward = _recomputed(module.forward)


def _checkpoint_blocks(model: Any, job: Job, loop: LoopOptions) -> None:
    """As the Trainer switches it on; off again for all but one of every so many blocks."""
    kwargs = {"use_reentrant": loop.reentrant_checkpointing, "preserve_rng_state": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        except ValueError as error:
            raise UserError(
                key="checkpointing", value=job.checkpointing, allowed=str(error).splitlines()[0]
            ) from error
    if not job.finetune.trains_weights:
        model.enable_input_require_grads()
    blocks: list[Any] = list(find_blocks(model))
    for index, block in enumerate(blocks):
        if index % job.checkpoint_every == 0:
            continue
        if not hasattr(block, "gradient_checkpointing"):
            raise NotCoveredError(
                key="checkpoint_every",
                value=job.checkpoint_every,
                allowed="1: this transformers switches checkpointing for all blocks at once",
            )
        block.gradient_checkpointing = False


def attention_module(block: nn.Module) -> Any:
    """The outermost module of a block that is an attention, by the name of its class."""
    return next(
        module
        for module in block.modules()
        if module is not block
        and "ttention" in type(module).__name__
        and any(parameter.dim() > 1 for parameter in module.parameters())
    )


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` in a checkpoint whose inputs are those that a gradient flows into.

    Masks and tables, which all blocks share, are not its own to save.
    """

    @wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        moved = {key: value for key, value in given.items() if _needs_gradient(value)}
        rest = {key: value for key, value in given.items() if key not in moved}
        keys, count = tuple(moved), len(args)

        def run(*inputs: torch.Tensor) -> Any:
            every = rest | dict(zip(keys, inputs, strict=True))
            named = {key: value for key, value in every.items() if isinstance(key, str)}
            return forward(*(every[index] for index in range(count)), **named)

        return checkpoint(run, *moved.values(), use_reentrant=False, preserve_rng_state=False)

    return again


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
