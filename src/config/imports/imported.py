"""What files say, in our keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from src.config.imports.reading import told_file
from src.errors import UserError

MAX_FILES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """What a file says.

    Attributes:
        value: as our keys and `settle.py` take it.
        file: the file.
        written: its key and value.
    """

    value: Any
    file: str
    written: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What files say, in our keys.

    Attributes:
        facts: our keys, with the file and its key that each comes from.
        warnings: what was taken, what was ignored and why.
    """

    facts: Mapping[str, Fact] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Our keys and their values."""
        return {key: fact.value for key, fact in self.facts.items()}

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Errors about a key that a file has set name the file and its key."""
        try:
            yield
        except UserError as error:
            fact = self.facts.get(error.key)
            if fact is None:
                raise
            value = f"{told_file(fact.file)}: {fact.written}"
            allowed = f"{error.allowed} (here {error.key}={error.value})"
            raise UserError(key="from", value=value, allowed=allowed) from error
