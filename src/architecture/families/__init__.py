"""One function per `model_type`: config fields in, Decoder out."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture.decoder import Decoder
from src.architecture.families.llama import llama
from src.architecture.fields import Fields

FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "llama": llama,
    "mistral": llama,
}
