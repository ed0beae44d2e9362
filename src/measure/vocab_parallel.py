"""Token embedding and head split along the vocabulary; every GPU gets all logits.

PyTorch's `RowwiseParallel` on the embedding, whose output is summed over the group, and
`ColwiseParallel` on the head, whose logits are gathered, as transformers' plans have it
(`colwise_gather_output`).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from src.memory import scaled_table, uneven_vocabulary
from src.spec import Job


def split_vocabulary(model: Any, mesh: Any, job: Job) -> None:
    """Split both; what was tied is one parameter still.

    Raises:
        UserError: the table is no plain lookup, or the group does not divide the vocabulary.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        raise scaled_table(job)
    for size in (embedding.num_embeddings, head.out_features):
        if size % mesh.size():
            raise uneven_vocabulary(size, mesh.size())
    holders = _holders(model, (embedding, head))
    names = {id(module): name for name, module in model.named_modules()}
    split: dict[int, nn.Parameter] = {}
    plan: tuple[tuple[Any, Any], ...] = (
        (embedding, RowwiseParallel(input_layouts=Replicate())),
        (head, ColwiseParallel(output_layouts=Replicate())),
    )
    for module, style in plan:
        before = {name: id(parameter) for name, parameter in module.named_parameters()}
        parallelize_module(model, mesh, {names[id(module)]: style})
        for name, parameter in module.named_parameters():
            split.setdefault(before[name], parameter)
    for key, parameter in split.items():
        for module, name in holders[key]:
            setattr(module, name, parameter)


def _holders(model: nn.Module, of: tuple[nn.Module, ...]) -> dict[int, list[tuple[Any, str]]]:
    """Every module and name under which parameters of some modules are held, by their ids."""
    found: dict[int, list[tuple[Any, str]]] = {
        id(parameter): [] for module in of for parameter in module.parameters()
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in found:
                found[id(parameter)].append((module, name))
    return found
