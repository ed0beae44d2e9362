"""Hugging Face config fields -> one Decoder description; exact parameter counts."""

from __future__ import annotations

from functools import lru_cache

from src.architecture.decoder import Block, Decoder, Positions
from src.architecture.families import FAMILIES
from src.architecture.fields import Fields
from src.errors import unknown_name
from src.spec import Model

__all__ = ["Block", "Decoder", "Positions", "describe", "supported_model_types"]


def supported_model_types() -> tuple[str, ...]:
    """Every `model_type` that `describe` knows."""
    return tuple(FAMILIES)


@lru_cache(maxsize=256)
def describe(model: Model) -> Decoder:
    """The Decoder of a model.

    Raises:
        UserError: the `model_type` is unknown, or a field is missing or wrong; it names which.
    """
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise unknown_name(
            key="model_type", value=model.model_type, known=FAMILIES, what="supported model types"
        )
    return family(Fields(model))
