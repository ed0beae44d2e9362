"""The optimizer of a job over the parameter groups that the Trainer makes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from src.measure.methods import local_tensor
from src.measure.options import LoopOptions
from src.spec import Job, Optimizer

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""transformers' `Trainer.get_decay_parameter_names`, forbidden names."""

LEARNING_RATE = 1e-5


def parameter_groups(model: nn.Module, loop: LoopOptions) -> list[dict[str, Any]]:
    """Trainable parameters with and without weight decay; one group if the loop asks for that."""
    named = [(n, local_tensor(p)) for n, p in model.named_parameters() if p.requires_grad]
    if not loop.trainer_groups:
        return [{"params": [p for _, p in named]}]
    layer_norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }

    def decays(name: str) -> bool:
        return name not in layer_norms and _NO_DECAY.search(name) is None

    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": 0.0},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, job: Job, loop: LoopOptions) -> torch.optim.Optimizer:
    """The job's optimizer; its implementation is named: the default depends on the device."""
    groups = parameter_groups(model, loop)
    if job.optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True)
    if job.optimizer is Optimizer.ADAMW_FUSED:
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    momentum = 0.9 if job.optimizer is Optimizer.SGD_MOMENTUM else 0.0
    return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=momentum, foreach=True)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Every tensor of the optimizer's state."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


def host_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """States that a CUDA run keeps on the host: step counters, unless the kernel is fused."""
    if optimizer.defaults.get("fused"):
        return
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            yield step
