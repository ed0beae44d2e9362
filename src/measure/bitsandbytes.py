"""bitsandbytes for machines without it: transformers' and PEFT's own code over the stand-ins.

transformers replaces the Linears (`replace_with_bnb_linear`), PEFT wraps them
(`peft.tuners.lora.bnb`, which is only defined where the package is found) and prepares the model;
only the package itself is replaced.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from src.measure.quantised import (
    OUTLIER_THRESHOLD,
    Int8Params,
    Linear4bit,
    Linear8bitLt,
    Params4bit,
    QuantisedLinear,
)
from src.spec import Finetune, Quantization

PACKAGE, ADAPTERS = "bitsandbytes", "peft.tuners.lora.bnb"


def _package() -> ModuleType:
    package = ModuleType(PACKAGE)
    package.__spec__ = ModuleSpec(PACKAGE, None)
    package.nn = SimpleNamespace(  # type: ignore[attr-defined]
        Linear4bit=Linear4bit,
        Linear8bitLt=Linear8bitLt,
        Params4bit=Params4bit,
        Int8Params=Int8Params,
    )
    return package


def _yes() -> bool:
    return True


def _dequantise(module: Any) -> Any:
    """`peft.utils.integrations.dequantize_module_weight`.

    It knows parameters by their class, which fake tensors do not have.
    """
    return module.dequantise() if isinstance(module, QuantisedLinear) else module.weight


@contextmanager
def simulated_bitsandbytes() -> Iterator[None]:
    """Within it, PEFT finds bitsandbytes installed."""
    import peft.import_utils
    import peft.tuners.lora.dora as dora
    import peft.tuners.lora.model as model

    with (
        _imported({PACKAGE: _package(), ADAPTERS: None}),
        mock.patch.object(peft.import_utils, "is_bnb_available", _yes),
        mock.patch.object(peft.import_utils, "is_bnb_4bit_available", _yes),
        mock.patch.object(model, "is_bnb_available", _yes),
        mock.patch.object(model, "is_bnb_4bit_available", _yes),
        mock.patch.object(dora, "dequantize_module_weight", _dequantise),
    ):
        importlib.import_module(ADAPTERS)
        yield


@contextmanager
def _imported(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Within it, these are what has been imported by those names; None: nothing.

    Others that are imported meanwhile stay, as they have to: libraries keep what is in them.
    """
    before = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update({name: module for name, module in modules.items() if module is not None})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def quantise(model: Any, finetune: Finetune, *, dtype: torch.dtype, storage: torch.dtype) -> None:
    """Replace the Linears as transformers' quantizers do, in place (on the meta device).

    The head, what is tied, and the weights of stacked experts stay as they are.

    Args:
        model: the model.
        finetune: how its Linears are stored.
        dtype: that of the model, and of products with four-bit weights.
        storage: dtype that four-bit weights are packed into.
    """
    from transformers.integrations import bitsandbytes as integration

    is_int8 = finetune.quantization is Quantization.INT8
    method = "llm_int8" if is_int8 else "nf4"
    config = SimpleNamespace(
        quantization_method=lambda: method,
        llm_int8_has_fp16_weight=False,
        llm_int8_threshold=OUTLIER_THRESHOLD,
        llm_int8_skip_modules=None,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=finetune.double_quant,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=storage,
    )
    with mock.patch.multiple(integration, create=True, **_missing_names()):
        kept = _keys_to_keep(model, integration)
        integration.replace_with_bnb_linear(
            model, modules_to_not_convert=kept, quantization_config=config
        )
    for module in model.modules():
        if isinstance(module, QuantisedLinear) and module.bias is not None:
            module.bias = nn.Parameter(module.bias.to(dtype), requires_grad=False)
    setattr(model, "is_loaded_in_8bit" if is_int8 else "is_loaded_in_4bit", True)


def _missing_names() -> dict[str, Any]:
    """What the module only imports where the package is found."""
    from transformers.pytorch_utils import Conv1D

    return {"bnb": _package(), "torch": torch, "nn": nn, "Conv1D": Conv1D}


def _keys_to_keep(model: Any, integration: Any) -> list[str]:
    try:
        from transformers.quantizers.base import get_keys_to_not_convert
    except ImportError:
        get_keys_to_not_convert = integration.get_keys_to_not_convert
    found: list[str] = get_keys_to_not_convert(model)
    return found
