"""The model of a step, built on the meta device by transformers and peft themselves."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.measure.options import LoopOptions
from src.spec import Attention, Job, Precision

ATTENTION_IMPLEMENTATIONS = {
    Attention.FLASH: "flash_attention_2",
    Attention.SDPA: None,
    Attention.EAGER: "eager",
}
"""transformers' names; None leaves the choice to it: SDPA, or eager where a family has no SDPA."""


def weight_dtype(job: Job) -> torch.dtype:
    """Dtype that the weights are loaded in; a model to quantise comes in the one that computes."""
    if job.finetune.is_quantized:
        return autocast_dtype(job.precision) or _unmixed_dtype(job.precision)
    return _unmixed_dtype(job.precision)


def _unmixed_dtype(precision: Precision) -> torch.dtype:
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
                **{_dtype_argument(): weight_dtype(job)},
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


def is_linear(module: nn.Module) -> bool:
    """Whether it is a Linear, or GPT-2's transposed one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
