"""Sequence parallelism: what tensor parallelism leaves whole holds 1/t of the sequence instead.

PyTorch's styles on transformers' modules. A row-parallel Linear's output is reduce-scattered along
the sequence, so the residual stream, its norms and its dropouts are split; it is gathered in front
of each module that begins with column-parallel Linears (an attention, an MLP), and behind the final
norm, for a head that is whole. The stem runs whole, for its positions are counted from the
sequence's length: its output is cut at the first block's entry.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel

from src.measure.blocks import final_norm
from src.measure.conv1d import RowConv1D


def _along_sequence(tensor: Any) -> Shard:
    """The sequence is the last dimension but one; OPT's MLP takes (tokens, width)."""
    return Shard(tensor.dim() - 2)


def _gather(tensor: Any, mesh: Any) -> Any:
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, (_along_sequence(tensor),), run_check=False)
    return tensor.redistribute(placements=(Replicate(),))


def _cut(tensor: Any, mesh: Any) -> Any:
    whole = DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False)
    return whole.redistribute(placements=(_along_sequence(tensor),)).to_local()


def _on_hidden_states(change: Any, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Change what a module calls `hidden_states`, which is the first argument where it has none."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


class ChangedInput(ParallelStyle):
    """A module whose hidden states are gathered, or cut, in front of it (`PrepareModuleInput`).

    Args:
        change: `_gather` or `_cut`.
    """

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        change = partial(self._change, mesh=device_mesh)
        module.register_forward_pre_hook(partial(_on_hidden_states, change), with_kwargs=True)
        return module


class GatheredOutput(ParallelStyle):
    """A module whose output is gathered behind it (`PrepareModuleOutput`)."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (_gather(output[0], device_mesh).to_local(), *output[1:])
            return _gather(output, device_mesh).to_local()

        module.register_forward_hook(hook)
        return module


class Whole(ParallelStyle):
    """A module that is whole on every GPU and works on distributed tensors."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh)


class SequenceNorm(SequenceParallel):
    """A norm on this GPU's part of the sequence, given and returned as a local tensor."""

    def __init__(self) -> None:
        super().__init__(use_local_output=True)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        """PyTorch's makes every parameter trainable; a frozen one stays frozen here."""
        trained = [parameter.requires_grad for parameter in module.parameters()]
        super()._replicate_module_fn(name, module, device_mesh)
        for parameter, is_trained in zip(module.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)

    @staticmethod
    def _prepare_input_fn(_sharding: Any, _module: Any, inputs: Any, device_mesh: Any) -> Any:
        where = (_along_sequence(inputs[0]),)
        return DTensor.from_local(inputs[0], device_mesh, where, run_check=False)


def _scatter(_layouts: Any, _local: bool, _module: Any, outputs: Any, _mesh: Any) -> Any:
    return outputs.redistribute(placements=(_along_sequence(outputs),), async_op=True).to_local()


class ScatteredRow(RowwiseParallel):
    """A row-parallel Linear whose output is reduce-scattered along the sequence."""

    _prepare_output_fn = staticmethod(_scatter)


class ScatteredRowConv1D(RowConv1D):
    """The same for GPT-2's Linear."""

    _prepare_output_fn = staticmethod(_scatter)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm, by the name of its class."""
    return "Norm" in type(module).__name__ and not list(module.children())


def around(
    model: nn.Module, blocks: list[nn.Module], columns: list[str]
) -> list[tuple[str, ParallelStyle]]:
    """Name and style of everything that sequence parallelism adds to the Linears' plan.

    Args:
        model: the model.
        blocks: its blocks.
        columns: full names of the column-parallel Linears.
    """
    names = {id(module): name for name, module in model.named_modules()}
    inside = {names[id(block)] for block in blocks}
    parents = [name.rpartition(".")[0] for name in columns]
    entries = dict.fromkeys(
        name if parent in inside else parent for name, parent in zip(columns, parents, strict=True)
    )
    plan: list[tuple[str, ParallelStyle]] = [(name, ChangedInput(_gather)) for name in entries]
    for block in blocks:
        for path, module in block.named_modules():
            full = f"{names[id(block)]}.{path}"
            if is_norm(module) and not any(full.startswith(f"{entry}.") for entry in entries):
                plan.append((full, SequenceNorm()))
    plan.append((names[id(blocks[0])], ChangedInput(_cut)))
    last = final_norm(model)
    if last is None:
        plan.append((names[id(blocks[-1])], GatheredOutput()))
    else:
        plan += [(last[0], SequenceNorm()), (last[0], GatheredOutput())]
    return plan
