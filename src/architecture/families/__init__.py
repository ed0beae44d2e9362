"""One function per `model_type`: config fields in, Decoder out."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture.decoder import Decoder
from src.architecture.families.bert import bert
from src.architecture.families.bloom import bloom
from src.architecture.families.deepseek import deepseek_v2
from src.architecture.families.falcon import falcon
from src.architecture.families.gemma import gemma, gemma2, gemma3_text
from src.architecture.families.gpt import gpt2, gpt_bigcode, gpt_neo
from src.architecture.families.gptj import codegen, gptj
from src.architecture.families.llama import llama, mistral
from src.architecture.families.llama_like import granite, olmo2, phi3, starcoder2
from src.architecture.families.moe import gpt_oss, mixtral, qwen3_moe
from src.architecture.families.neox import gpt_neox, phi, stablelm
from src.architecture.families.opt import biogpt, opt
from src.architecture.families.qwen import qwen2, qwen3
from src.architecture.fields import Fields

FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "bert": bert,
    "biogpt": biogpt,
    "bloom": bloom,
    "codegen": codegen,
    "deepseek_v2": deepseek_v2,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}
