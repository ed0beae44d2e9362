"""Tensor-parallel plans: every Linear of a block split by columns or rows (Megatron's scheme)."""

from __future__ import annotations

from typing import Any

from torch import nn

from src.errors import UserError
from src.measure.build import is_linear
from src.measure.expert_parallel import check_experts, is_experts, split_experts
from src.memory import unsplit_adapters, whole_experts
from src.spec import Job

COLUMNS = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "query", "key",
        "value", "gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h",
    }
)  # fmt: skip
"""Linears whose outputs are split: heads of an attention, width of an MLP."""

ROWS = frozenset(
    {
        "o_proj", "out_proj", "down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "dense",
    }
)  # fmt: skip
"""Linears whose inputs are split; their outputs are summed over the group."""

HEAD_COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "kv_heads",
)  # fmt: skip
WIDTHS = ("embed_dim", "all_head_size", "split_size", "hidden_size")
"""Attributes of attention modules that their code reshapes by; divided along with the heads."""


def plan(model: nn.Module, blocks: list[nn.Module], degree: int) -> dict[str, str]:
    """Full name -> "columns" or "rows" of every Linear of the blocks.

    Raises:
        UserError: a Linear has no known place, or heads or widths do not divide by `degree`.
    """
    config: Any = model.config
    kv_heads = getattr(config, "num_key_value_heads", None)
    if isinstance(kv_heads, int) and kv_heads % degree:
        raise UserError(
            key="tp", value=degree, allowed=f"a divisor of num_key_value_heads={kv_heads}"
        )
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for block in blocks:
        for path, module in block.named_modules():
            if is_adapter(path):
                continue
            if is_linear(module):
                place = _place(adapted_name(path), module, degree)
                found[f"{names[id(block)]}.{path}"] = place
            elif is_experts(module):
                check_experts(path, module, degree)
    return found


def is_adapter(path: str) -> bool:
    """Whether a module is inside one of PEFT's adapters."""
    return ".lora_" in path


def adapted_name(path: str) -> str:
    """The name that a Linear has without PEFT, which puts it into a module of that name."""
    return path.removesuffix(".base_layer")


def _place(path: str, module: nn.Module, degree: int) -> str:
    name = path.rsplit(".", 1)[-1]
    if path.endswith("intermediate.dense"):
        name = "fc1"
    if name not in COLUMNS | ROWS:
        raise UserError(
            key="method", value="tp", allowed=f"no tensor-parallel plan for the Linear {path}"
        )
    place = "columns" if name in COLUMNS else "rows"
    rows, columns = _shape(module)
    size = columns if place == "columns" else rows
    if size % degree:
        raise UserError(
            key="tp", value=degree, allowed=f"a divisor of the {size} {place} of {path}"
        )
    return place


def _shape(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a Linear or a Conv1D."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return int(module.weight.shape[0]), int(module.weight.shape[1])


def divide_heads(blocks: list[nn.Module], degree: int) -> None:
    """Tell the attention modules how many heads are theirs.

    Raises:
        UserError: the heads do not divide by `degree`.
    """
    for block in blocks:
        for module in block.modules():
            if "ttention" not in type(module).__name__:
                continue
            for name in HEAD_COUNTS:
                _divide(module, name, degree, required=True)
            for name in WIDTHS:
                _divide(module, name, degree, required=False)


def _divide_alibi(model: nn.Module, degree: int) -> None:
    """BLOOM computes its position biases once, from the model's own head count."""
    for module in model.modules():
        if type(module).__name__ == "BloomModel":
            _divide(module, "num_heads", degree, required=True)


def gathered(name: str, found: dict[str, str], model: nn.Module) -> bool:
    """Whether a Linear's split dimension is whole outside it.

    So it is, as in transformers' `*_gather_output` plans, for projections that are normed over all
    heads (OLMo 2's q and k) and for fused ones that the code cuts by position (Phi-3's), and for
    what follows them.
    """
    parent = model.get_submodule(adapted_name(name).rpartition(".")[0])
    leaves = {adapted_name(path).rsplit(".", 1)[-1] for path in found}
    if {"qkv_proj", "gate_up_proj"} <= leaves:
        return True
    norm = getattr(getattr(parent, "q_norm", None), "weight", None)
    query = getattr(getattr(parent, "q_proj", None), "weight", None)
    return norm is not None and query is not None and norm.shape[0] == query.shape[0]


def _divide(module: nn.Module, name: str, degree: int, *, required: bool) -> None:
    count = vars(module).get(name)
    if not isinstance(count, int) or isinstance(count, bool):
        return
    if count % degree == 0:
        setattr(module, name, count // degree)
    elif required:
        raise UserError(key="tp", value=degree, allowed=f"a divisor of {name}={count}")


def parallelize(model: nn.Module, blocks: list[nn.Module], mesh: Any, job: Job) -> None:
    """Split the blocks' Linears over `mesh`.

    Everything else stays whole on every GPU, or is split along the sequence.

    Raises:
        UserError: the model or its adapters cannot be split so.
    """
    sequence_parallel = job.sequence_parallel
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    from src.measure.conv1d import ColumnConv1D, RowConv1D
    from src.measure.sequence_parallel import ScatteredRow, ScatteredRowConv1D, around

    found = plan(model, blocks, mesh.size())
    is_whole = {name: gathered(name, found, model) for name in found}
    if not any(is_whole.values()):
        divide_heads(blocks, mesh.size())
        _divide_alibi(model, mesh.size())
    experts = [module for block in blocks for module in block.modules() if is_experts(module)]
    for module in experts:
        split_experts(module, mesh)
    added = []
    if sequence_parallel:
        if experts:
            raise whole_experts(job)
        firsts = [adapted_name(name) for name, place in found.items() if place == "columns"]
        added = around(model, blocks, firsts)
    # Hooks run in the order of their registration: gathered before a Linear takes its input.
    for name, style in added:
        parallelize_module(model, mesh, {name: style})
    rows = (ScatteredRow, ScatteredRowConv1D) if sequence_parallel else (RowwiseParallel, RowConv1D)
    columns = (ColwiseParallel, ColumnConv1D)
    styles: dict[str, ParallelStyle] = {}
    for name, place in found.items():
        outside = Replicate() if is_whole[name] else Shard(-1)
        kind = int(not isinstance(model.get_submodule(name), nn.Linear))
        if place == "columns":
            styles[name] = columns[kind](output_layouts=outside)
        else:
            styles[name] = rows[kind](input_layouts=outside)
        if not is_whole[name]:
            styles |= _adapter_styles(model, name, place, rows[0], whole=sequence_parallel)
        elif sequence_parallel and adapted_name(name) != name:
            raise unsplit_adapters(job)
    parallelize_module(model, mesh, styles)


def _adapter_styles(
    model: nn.Module, name: str, place: str, row: Any, *, whole: bool
) -> dict[str, Any]:
    """How LoRA's A and B follow their Linear, as PEFT has it (`LoraModel._create_and_replace`).

    B of a column-parallel Linear is split by columns, A of a row-parallel one by rows, the other
    one is whole; around a Linear whose split ends at its own output or input, both are.

    Args:
        model: the model.
        name: of the Linear; one without adapters has none to split.
        place: "columns" or "rows".
        row: the style of row-parallel Linears.
        whole: whether a whole A is given distributed tensors.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel

    from src.measure.sequence_parallel import Whole

    if adapted_name(name) == name:
        return {}
    adapted: Any = model.get_submodule(adapted_name(name))
    styles: dict[str, Any] = {}
    for adapter in adapted.lora_A:
        first, second = (f"{adapted_name(name)}.lora_{side}.{adapter}" for side in "AB")
        if place == "rows":
            styles[first] = row()
            continue
        styles[second] = ColwiseParallel()
        if whole:
            styles[first] = Whole()
    return styles
