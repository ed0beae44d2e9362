"""The model of a step, built on the meta device by transformers and peft themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.measure.options import LoopOptions
from src.measure.quantised import adapt_like_bitsandbytes, quantise
from src.spec import Attention, Finetune, Job, Precision

ATTENTION_IMPLEMENTATIONS = {
    Attention.FLASH: "flash_attention_2",
    Attention.SDPA: None,
    Attention.EAGER: "eager",
}
"""transformers' names; None leaves the choice to it: SDPA, or eager where a family has no SDPA."""

ATTENTION_PROJECTIONS = (
    frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    frozenset({"q_proj", "k_proj", "v_proj", "out_proj"}),
    frozenset({"q_proj", "k_proj", "v_proj", "dense"}),
    frozenset({"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    frozenset({"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    frozenset({"query_key_value", "dense"}),
    frozenset({"qkv_proj", "out_proj"}),
    frozenset({"qkv_proj", "o_proj"}),
    frozenset({"c_attn", "c_proj"}),
    frozenset({"query", "key", "value", "dense"}),
)
"""Names of the Linears inside an attention module, per family."""


def weight_dtype(precision: Precision) -> torch.dtype:
    """Dtype of the stored weights."""
    return torch.bfloat16 if precision is Precision.BF16_TRUE else torch.float32


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Dtype that autocast computes in; None where there is no autocast."""
    mixed = {Precision.BF16_MIXED: torch.bfloat16, Precision.FP16_MIXED: torch.float16}
    return mixed.get(precision)


def _config(job: Job) -> Any:
    from transformers import AutoConfig

    values = {key: value for key, value in job.model.config.items() if key != "model_type"}
    for key in ("torch_dtype", "dtype", "quantization_config", "transformers_version"):
        values.pop(key, None)
    if job.model.model_type == "bert":
        values["is_decoder"] = True
    try:
        config = AutoConfig.for_model(job.model.model_type, **values)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            key="model_type",
            value=job.model.model_type,
            allowed=f"transformers refuses its config: {reason[:300]}",
        ) from error
    if getattr(config, "layerdrop", 0):
        config.layerdrop = 0.0
    return config


def _check_flash(job: Job, config: Any) -> None:
    """Refuse flash where transformers would load another kernel than FlashAttention-2.

    Those are kernels that know attention sinks, whose backward pass does not (flash-attention issue
    1797). Falcon's code refuses flash beside ALiBi when it runs.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if job.attention is not Attention.FLASH or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    compatible = getattr(model_class, "_compatible_flash_implementations", None) or ()
    others_only = len(compatible) > 0 and "flash_attention_2" not in compatible
    if others_only or getattr(config, "alibi", False):
        raise UserError(
            key="attention",
            value="flash",
            allowed=f"{job.model.model_type} trains with no FlashAttention-2; use sdpa or eager",
        )


def build_model(job: Job, loop: LoopOptions) -> nn.Module:
    """The causal language model of `job` on the meta device, in training mode.

    Raises:
        UserError: transformers does not know the model, or not with this attention.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = _config(job)
    config.use_cache = loop.use_cache
    _check_flash(job, config)
    implementation = ATTENTION_IMPLEMENTATIONS[job.attention]
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                attn_implementation=implementation,
                **{_dtype_argument(): weight_dtype(job.precision)},
            )
    except (ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            key="attention" if "ttention" in reason else "model",
            value=job.attention if "ttention" in reason else job.model.name,
            allowed=f"transformers cannot build this model so: {reason.split(' Please')[0][:300]}",
        ) from error
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    return model.train()


def _dtype_argument() -> str:
    import transformers

    return "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose class is an attention, innermost ones that hold Linears."""
    for name, module in model.named_modules():
        if "ttention" in type(module).__name__ and any(
            is_linear(child) for child in module.children()
        ):
            yield name, module


def is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, or GPT-2's transposed one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


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


def add_lora(model: Any, job: Job, loop: LoopOptions) -> nn.Module:
    """`model` with PEFT's adapters on the meta device; everything else frozen.

    Raises:
        UserError: PEFT is missing, or refuses the targets.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(
            key="finetune.kind", value="lora", allowed="needs the peft package"
        ) from error
    finetune = job.finetune
    if loop.nf4:
        storage = torch.bfloat16 if loop.fsdp1 else torch.uint8
        quantise(model, compute_dtype=torch.bfloat16, storage_dtype=storage)
    config = peft.LoraConfig(
        r=finetune.r,
        lora_alpha=finetune.alpha,
        lora_dropout=finetune.dropout,
        target_modules=lora_targets(model, finetune),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    if loop.kbit_preparation:
        _prepare_for_kbit(model)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            wrapped: nn.Module = peft.get_peft_model(
                model, config, autocast_adapter_dtype=loop.fp32_adapters
            )
    except (ValueError, TypeError) as error:
        raise UserError(
            key="finetune.targets",
            value=list(finetune.targets),
            allowed=f"peft refuses them: {str(error).splitlines()[0][:300]}",
        ) from error
    if loop.nf4:
        adapt_like_bitsandbytes(wrapped)
    return wrapped.train()


def _prepare_for_kbit(model: nn.Module) -> None:
    """Norms in fp32: what `prepare_model_for_kbit_training` and TRL after it leave.

    PEFT turns every parameter that is not quantised to fp32; TRL's `peft_module_casting_to_bf16`
    turns embeddings and the head back.
    """
    for name, module in model.named_modules():
        if "norm" not in name.lower() and not isinstance(module, nn.LayerNorm):
            continue
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dtype in (torch.float16, torch.bfloat16):
                module._parameters[key] = nn.Parameter(parameter.float(), requires_grad=False)
