"""One function per `model_type`: config fields in, Decoder out."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture.decoder import Decoder
from src.architecture.families.bloom import bloom
from src.architecture.families.gemma import gemma
from src.architecture.families.gpt import gpt2, gpt_bigcode, gpt_neo
from src.architecture.families.gptj import codegen, gptj
from src.architecture.families.llama import llama, mistral
from src.architecture.families.neox import gpt_neox
from src.architecture.families.opt import biogpt, opt
from src.architecture.families.qwen import qwen2, qwen3
from src.architecture.fields import Fields

FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "biogpt": biogpt,
    "bloom": bloom,
    "codegen": codegen,
    "gemma": gemma,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "llama": llama,
    "mistral": mistral,
    "opt": opt,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
