"""Typed access to the fields of a Hugging Face config; a missing or wrong one is named."""

from __future__ import annotations

from dataclasses import dataclass

from src.errors import UserError
from src.spec import Model

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The config fields of one model. Names may be several: the first that is there counts."""

    model: Model

    def _find(self, names: tuple[str, ...]) -> object:
        for name in names:
            value = self.model.config.get(name, _MISSING)
            if value is not _MISSING and value is not None:
                return value
        return None

    def _error(self, name: str, value: object, allowed: str) -> UserError:
        return UserError(
            key=f"arch.{name}",
            value=value,
            allowed=f"{allowed} (config of {self.model.name}, model_type {self.model.model_type})",
        )

    def optional_integer(self, *names: str) -> int | None:
        """A whole number, 1 or more; None where the field is absent or null."""
        value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(names[0], value, "a whole number, 1 or more")
        return value

    def integer(self, *names: str) -> int:
        """A whole number, 1 or more; its absence is an error."""
        value = self.optional_integer(*names)
        if value is None:
            raise self._error(names[0], "missing", "the field is needed")
        return value

    def probability(self, *names: str, default: float = 0.0) -> float:
        """A dropout probability, 0 to below 1."""
        value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise self._error(names[0], value, "0 or more and below 1")
        return float(value)

    def fraction(self, *names: str, default: float) -> float:
        """A number above 0 and at most 1."""
        value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._error(names[0], value, "above 0 and at most 1")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(names[0], value, "true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        """A word."""
        value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._error(names[0], value, "a word")
        return value

    def present(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.model.config.get(name) is not None

    def divisible(self, name: str, value: int, by_name: str, by: int) -> int:
        """`value // by`; an error where that leaves a rest."""
        if value % by:
            raise self._error(name, value, f"a multiple of {by_name}={by}")
        return value // by
