"""The optimizer of a job over the parameter groups that the Trainer makes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from src.measure.bitsandbytes_optimizers import BitsandbytesOptimizer
from src.measure.methods import local_tensor
from src.measure.options import LoopOptions
from src.spec import Job, Optimizer

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""transformers' `Trainer.get_decay_parameter_names`, forbidden names."""

LEARNING_RATE = 1e-5

_PYTORCH: dict[Optimizer, tuple[Any, dict[str, Any]]] = {
    Optimizer.ADAMW: (torch.optim.AdamW, {"foreach": True}),
    Optimizer.ADAMW_FUSED: (torch.optim.AdamW, {"fused": True}),
    Optimizer.ADAMW_LOOP: (torch.optim.AdamW, {"foreach": False, "fused": False}),
    Optimizer.SGD: (torch.optim.SGD, {"foreach": True}),
    Optimizer.SGD_MOMENTUM: (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
}
_BITSANDBYTES: dict[Optimizer, dict[str, Any]] = {
    Optimizer.ADAMW_8BIT: {"num_states": 2, "bits": 8},
    Optimizer.PAGED_ADAMW: {"num_states": 2, "paged": True},
    Optimizer.PAGED_ADAMW_8BIT: {"num_states": 2, "bits": 8, "paged": True},
    Optimizer.LION: {"num_states": 1},
}


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


def build_optimizer(
    model: nn.Module, blocks: list[nn.Module], job: Job, loop: LoopOptions
) -> torch.optim.Optimizer:
    """The job's optimizer; its implementation is named: the default depends on the device.

    Args:
        model: the model.
        blocks: its blocks, whose matrices Muon takes.
        job: the job.
        loop: how parameters are grouped.
    """
    groups = parameter_groups(model, loop)
    if job.optimizer is Optimizer.MUON:
        return Muon(groups, blocks)
    if job.optimizer is Optimizer.ADAFACTOR:
        from transformers.optimization import Adafactor

        options = {"scale_parameter": False, "relative_step": False}
        made: torch.optim.Optimizer = Adafactor(groups, lr=LEARNING_RATE, **options)  # type: ignore[no-untyped-call]
        return made
    if job.optimizer in _BITSANDBYTES:
        options = _BITSANDBYTES[job.optimizer]
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        return BitsandbytesOptimizer(groups, in_32_bits=tables, **options)
    kind, options = _PYTORCH[job.optimizer]
    pytorch: torch.optim.Optimizer = kind(groups, lr=LEARNING_RATE, **options)
    return pytorch


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon for the blocks' matrices, fused AdamW for every other parameter.

    Args:
        groups: parameter groups.
        blocks: the blocks.
    """

    def __init__(self, groups: list[dict[str, Any]], blocks: list[nn.Module]) -> None:
        super().__init__(groups, {"fused": True})
        inside = {id(local_tensor(p)) for block in blocks for p in block.parameters()}
        every = [p for group in groups for p in group["params"]]
        matrices = [p for p in every if id(p) in inside and p.ndim == 2]
        taken = {id(p) for p in matrices}
        others = [p for p in every if id(p) not in taken]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=LEARNING_RATE))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=LEARNING_RATE, fused=True))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both."""
        assert closure is None
        for part in self._parts:
            part.step()
            self.state.update(part.state)


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
