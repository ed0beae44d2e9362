"""A model as its Hugging Face config describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from src.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """A model to fine-tune. Two are equal when name, hub id and config are.

    Attributes:
        name: what the user called it, or the zoo's name.
        hf_id: id on the Hugging Face hub; None for a config of the user's own.
        config: the fields of its config.json, as JSON gives them.
    """

    name: str
    hf_id: str | None
    config: Mapping[str, object] = field(repr=False)
    _key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.config.get("model_type"), str):
            raise UserError(
                key="model_type",
                value=self.config.get("model_type"),
                allowed=f"the config of {self.name} has to name its model_type",
            )
        try:
            key = json.dumps([self.name, self.hf_id, dict(self.config)], sort_keys=True)
        except TypeError as error:
            raise UserError(
                key="model", value=self.name, allowed=f"its config has to be plain JSON ({error})"
            ) from error
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))
        object.__setattr__(self, "_key", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def model_type(self) -> str:
        """The `model_type` of transformers."""
        return str(self.config["model_type"])
