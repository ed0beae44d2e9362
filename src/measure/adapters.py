"""What fine-tuning does to a model before it is trained: PEFT's own code, on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.measure.bitsandbytes import quantise
from src.measure.blocks import find_blocks
from src.measure.build import is_linear, weight_dtype
from src.measure.options import LoopOptions
from src.memory import check_trained_blocks
from src.spec import Finetune, FinetuneKind, Job, Method, Upcast

HALF = (torch.float16, torch.bfloat16)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose class is an attention, innermost ones that hold Linears."""
    for name, module in model.named_modules():
        if "ttention" in type(module).__name__ and any(
            is_linear(child) for child in module.children()
        ):
            yield name, module


def lora_targets(model: nn.Module, finetune: Finetune) -> list[str] | str:
    """PEFT's `target_modules`: those given, `all-linear`, or the attention's own Linears.

    Full paths are returned for the attention's Linears, since short names ("dense", "c_proj") also
    occur elsewhere in a block.

    Raises:
        UserError: the model has no attention module with Linears.
    """
    if finetune.targets == ("all-linear",):
        return "all-linear"
    if finetune.targets:
        return list(finetune.targets)
    found = [
        f"{name}.{child}"
        for name, module in attention_modules(model)
        for child, linear in module.named_children()
        if is_linear(linear)
    ]
    # BERT keeps the output projection in a module of its own beside the attention.
    found += [
        f"{name}.dense"
        for name, module in model.named_modules()
        if type(module).__name__ == "BertSelfOutput"
    ]
    if not found:
        raise UserError(
            key="finetune.targets",
            value="[]",
            allowed="name the Linears: no attention projections were found in this model",
        )
    return found


def prepare(model: Any, job: Job, method: Method, loop: LoopOptions) -> nn.Module:
    """`model` as the job fine-tunes it: quantised, frozen, with adapters.

    Raises:
        UserError: PEFT is missing, or refuses the job.
    """
    finetune = job.finetune
    if finetune.kind is FinetuneKind.FULL:
        return model  # type: ignore[no-any-return]
    if finetune.kind is FinetuneKind.FREEZE:
        return freeze(model, finetune)
    if finetune.is_quantized:
        dtype = weight_dtype(job)
        # FSDP shards floating-point parameters alone (bitsandbytes' `bnb_4bit_quant_storage`).
        storage = dtype if method.is_fsdp else torch.uint8
        quantise(model, finetune, dtype=dtype, storage=storage)
        upcast(model, finetune.upcast)
    return _add_peft(model, finetune, loop).train()


def freeze(model: nn.Module, finetune: Finetune) -> nn.Module:
    """`model` with the last blocks trained and everything else frozen.

    Raises:
        UserError: it has fewer blocks.
    """
    blocks = find_blocks(model)
    check_trained_blocks(finetune, len(blocks))
    model.requires_grad_(False)
    for block in blocks[-finetune.trained_blocks :]:
        block.requires_grad_(True)
    return model


def upcast(model: nn.Module, what: Upcast) -> None:
    """Turn what is not quantised to fp32, or the norms of it.

    For the norms alone: PEFT turns everything to fp32, then TRL's `peft_module_casting_to_bf16`
    turns all but the norms back.
    """
    import peft

    if what is Upcast.ALL:
        peft.prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=False
        )
    if what is not Upcast.NORMS:
        return
    for name, module in model.named_modules():
        if "norm" not in name.lower() and not isinstance(module, nn.LayerNorm):
            continue
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dtype in HALF:
                module._parameters[key] = nn.Parameter(parameter.float(), requires_grad=False)


def _peft_config(model: nn.Module, finetune: Finetune) -> Any:
    import peft

    if finetune.kind is FinetuneKind.PREFIX:
        return peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=finetune.num_virtual_tokens
        )
    if finetune.kind is FinetuneKind.PROMPT:
        return peft.PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=finetune.num_virtual_tokens
        )
    return peft.LoraConfig(
        r=finetune.r,
        lora_alpha=finetune.alpha,
        lora_dropout=finetune.dropout,
        target_modules=lora_targets(model, finetune),
        use_dora=finetune.dora,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )


def _add_peft(model: Any, finetune: Finetune, loop: LoopOptions) -> nn.Module:
    """`model` with what PEFT trains; everything else frozen."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            key="finetune.kind", value=finetune.kind, allowed="needs the peft package"
        ) from error
    config = _peft_config(model, finetune)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            wrapped: nn.Module = peft.get_peft_model(
                model, config, autocast_adapter_dtype=loop.fp32_adapters
            )
    except (ValueError, TypeError) as error:
        raise UserError(
            key="finetune.targets" if finetune.is_lora else "finetune",
            value=list(finetune.targets) if finetune.is_lora else finetune.kind,
            allowed=f"peft refuses it: {str(error).splitlines()[0][:300]}",
        ) from error
    return wrapped
