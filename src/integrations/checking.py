"""Whether the case that was read off a run is the run: its model built again, and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.integrations.reading import base_model, innermost
from src.measure.case import Case
from src.measure.coverage import require_covered
from src.measure.dry_run import build
from src.measure.methods import local_tensor
from src.spec import Method
from src.units import GIB, MIB

_UNEXPLAINED_SHARE = 0.05
_UNEXPLAINED_BYTES = 64 * MIB
"""What a run may hold beside its model before it is another one: batches, workspaces, counters."""


def check_same_model(case: Case, model: nn.Module) -> None:
    """Build the case's model on the meta device, and compare every parameter with the run's.

    Raises:
        UserError: the builder does not cover the case, or builds another model.
    """
    from transformers.utils import logging

    require_covered(case.step.job, case.step.method, case.loop)
    verbosity = logging.get_verbosity()
    try:
        with torch.random.fork_rng(devices=[]):
            built, _ = build(case, whole=True)
    finally:
        logging.set_verbosity(verbosity)
    expected, found = type(base_model(built)).__name__, type(base_model(model)).__name__
    # FSDP makes a class of its own of each.
    if found.removeprefix("FSDP") != expected:
        raise UserError(key="model", value=found, allowed=f"a case of its config is a {expected}")
    other = _counts(model) - _counts(built) or _counts(built) - _counts(model)
    if other:
        shape, dtype, is_trained = next(iter(other))
        words = f"{'trained' if is_trained else 'frozen'} {dtype} {list(shape)}"
        allowed = "a parameter that the case's model and this one do not share"
        raise UserError(key="model", value=words.replace("torch.", ""), allowed=allowed)


def _counts(model: nn.Module) -> Counter[tuple[tuple[int, ...], torch.dtype, bool]]:
    return Counter((tuple(p.shape), p.dtype, p.requires_grad) for p in model.parameters())


def check_nothing_else(
    case: Case, model: nn.Module, optimizer: Any, *, held_bytes: int, peak_bytes: int
) -> None:
    """Compare what was allocated before the step with the model's and the optimizer's bytes.

    Raises:
        UserError: there is more, as of a second model.
    """
    known = _bytes((*model.parameters(), *model.buffers()), model)
    states = innermost(optimizer).state.values()
    known += _bytes((tensor for state in states for tensor in state.values()), model)
    if case.step.method is Method.DDP:  # buckets
        known += _bytes((p for p in model.parameters() if p.requires_grad), model)
    more = held_bytes - known
    if more > max(_UNEXPLAINED_BYTES, _UNEXPLAINED_SHARE * peak_bytes):
        allowed = "bytes on the GPU before the step that are not this model's"
        raise UserError(key="allocated", value=f"{more / GIB:.2f} GiB", allowed=allowed)


def _bytes(tensors: Iterable[Any], model: nn.Module) -> int:
    """Of the tensors that are where the model is, each storage once."""
    device = local_tensor(next(model.parameters())).device
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and local_tensor(tensor).device == device:
            storage = local_tensor(tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
