"""Whether FSDP takes the dtypes of a model's parameters, before it is spread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from src.measure.blocks import find_blocks
from src.measure.case import Case
from src.memory import mixed_dtypes


def check_dtypes(model: nn.Module, case: Case) -> None:
    """Refuse a unit of which FSDP's own code would say that its dtypes differ.

    FSDP2 looks at what a unit trains. FSDP1 flattens all of a unit; trained leaf modules of an
    adapted model are units of their own there.

    Raises:
        NotCoveredError: names the precision and a parameter that does not follow it.
    """
    step = case.step
    if not step.method.is_fsdp or step.layout.shard == 1:
        return
    frozen = case.loop.fsdp1 and step.job.finetune.is_lora
    in_blocks: set[int] = set()
    for unit in (*find_blocks(model), model):
        named = [
            (name, parameter)
            for name, parameter in unit.named_parameters()
            if id(parameter) not in in_blocks and parameter.requires_grad is not frozen
        ]
        in_blocks |= {id(parameter) for _, parameter in named}
        odd = _odd_one(named)
        if odd is not None:
            raise mixed_dtypes(step.job, odd)


def _odd_one(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """The first parameter whose dtype is not that of most elements; None where all are alike."""
    sizes: Counter[torch.dtype] = Counter()
    named = list(named)
    for _, parameter in named:
        sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return None
    usual = sizes.most_common(1)[0][0]
    return next(name for name, parameter in named if parameter.dtype != usual)
