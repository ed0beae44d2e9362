"""Which loss exists for which family: facts of transformers 4.48 and of Liger-Kernel."""

from __future__ import annotations

from enum import StrEnum

from src.errors import NotCoveredError
from src.spec import Loss


class Upcast4x(StrEnum):
    """What transformers 4.48 does with a family's logits before its cross entropy.

    `copy`: an fp32 copy beside them (`ForCausalLMLoss`); `in-place`: they become fp32 where the
    head gives them; `round-trip`: the same, and back to the hidden states' dtype behind the loss;
    `none`: they keep their dtype.
    """

    COPY = "copy"
    IN_PLACE = "in-place"
    ROUND_TRIP = "round-trip"
    NONE = "none"


UPCASTS_4X: dict[str, Upcast4x] = {
    **dict.fromkeys(
        (
            "bert", "gemma", "gemma2", "granite", "llama", "mistral", "mixtral", "olmo2", "phi",
            "phi3", "qwen2", "starcoder2",
        ),
        Upcast4x.COPY,
    ),
    **dict.fromkeys(("codegen", "gptj"), Upcast4x.IN_PLACE),
    "gpt_neo": Upcast4x.ROUND_TRIP,
    **dict.fromkeys(
        (
            "biogpt", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "stablelm",
        ),
        Upcast4x.NONE,
    ),
}  # fmt: skip
"""By `model_type`, as transformers 4.48's modelling files have it; 4.49 shifts labels instead."""

LIGER_FAMILIES = frozenset(
    {
        "deepseek_v2", "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral",
        "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe",
    }
)  # fmt: skip
"""Families whose `forward` Liger-Kernel 0.8 replaces by one with the fused loss.

Source: `monkey_patch.py`.

Granite has other kernels of Liger's, but scales its logits, which the fused loss does not.
"""


def check_loss(model_type: str, loss: Loss) -> None:
    """Refuse a loss that the libraries do not have for a family.

    Raises:
        NotCoveredError: says which library lacks it.
    """
    if loss is Loss.STANDARD_4X and model_type not in UPCASTS_4X:
        allowed = f"transformers 4.48, the last version with this loss, has no {model_type}"
    elif loss is Loss.LIGER and model_type not in LIGER_FAMILIES:
        allowed = f"Liger-Kernel fuses head and loss of other families than {model_type}"
    else:
        return
    raise NotCoveredError(key="loss", value=loss, allowed=f"{allowed}; standard or chunked")
