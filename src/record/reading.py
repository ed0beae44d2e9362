"""Reading one row's JSON strictly: every wrong value is a UserError that names the row and key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, NoReturn, Self, TypeVar

from src.errors import UserError

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


class Reader:
    """One JSON object of a row; each key is asked for once, and none may be left over."""

    def __init__(self, raw: Mapping[str, Any], *, row_id: str, path: str = "") -> None:
        self._raw = raw
        self._row_id = row_id
        self._path = path
        self._asked: set[str] = set()

    @classmethod
    def of_row(cls, raw: object, *, schema_version: int) -> Self:
        """The reader of a whole row.

        Raises:
            UserError: it is no object, has no id, or is of another schema version.
        """
        if not isinstance(raw, Mapping):
            raise UserError(key="row", value="?", allowed="has to be a JSON object")
        found = raw.get("row_id")
        reader = cls(raw, row_id=found if isinstance(found, str) and found else "?")
        version = reader._take("schema_version")
        if version != schema_version or isinstance(version, bool):
            reader._refuse("schema_version", f"unknown schema version {version!r}")
        return reader

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise UserError(key="row", value=self._row_id, allowed=f"{self._path}{key}: {what}")

    def _take(self, key: str) -> Any:
        self._asked.add(key)
        if key not in self._raw:
            self._refuse(key, "missing")
        return self._raw[key]

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, f"{value!r} is no number")
        if not math.isfinite(value) or value < 0:
            self._refuse(key, f"{value!r} is no number of 0 or more")
        return value

    def _bytes(self, key: str, value: Any) -> int:
        number = self._number(key, value)
        if not isinstance(number, int):
            self._refuse(key, f"{value!r} is no whole number")
        return number

    def _check_json(self, key: str, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(key, f"{value!r} is no number")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                self._check_json(f"{key}.{name}", inner)
        elif isinstance(value, list):
            for inner in value:
                self._check_json(key, inner)
        return value

    def nothing_else(self) -> None:
        """Refuse keys that nobody asked for."""
        for key in self._raw:
            if key not in self._asked:
                self._refuse(key, "no key of a row")

    def same(self, key: str, expected: str) -> None:
        """Refuse a hash that is not the expected one."""
        if self._take(key) != expected:
            self._refuse(key, f"{self._raw[key]!r} is not the hash of what it says, {expected}")

    def part(self, key: str) -> Reader:
        """The reader of an inner object."""
        return Reader(self.mapping(key), row_id=self._row_id, path=f"{self._path}{key}.")

    def parts(self, key: str) -> list[Reader]:
        """The readers of a list of objects."""
        return [
            Reader({"": inner}, row_id=self._row_id, path=f"{self._path}{key}").part("")
            for inner in self._list(key)
        ]

    def _list(self, key: str) -> list[Any]:
        value = self._take(key)
        if not isinstance(value, list):
            self._refuse(key, f"{value!r} is no list")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object of any JSON values without NaN."""
        value = self._take(key)
        if not isinstance(value, Mapping):
            self._refuse(key, f"{value!r} is no object")
        return dict(self._check_json(key, value))

    def text(self, key: str) -> str:
        """A text."""
        value = self._take(key)
        if not isinstance(value, str):
            self._refuse(key, f"{value!r} is no text")
        return value

    def text_or_none(self, key: str) -> str | None:
        """A text or null."""
        return None if self._take(key) is None else self.text(key)

    def time(self, key: str) -> str:
        """A moment in ISO 8601 with its time zone, as it was written."""
        value = self.text(key)
        try:
            has_zone = datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            has_zone = False
        if not has_zone:
            self._refuse(key, f"{value!r} is no ISO 8601 time with a zone")
        return value

    def words(self, key: str) -> list[str]:
        """A list of texts."""
        value = self._list(key)
        if not all(isinstance(word, str) for word in value):
            self._refuse(key, "is no list of texts")
        return value

    def texts(self, key: str) -> dict[str, str]:
        """Names and texts."""
        value = self.mapping(key)
        for name, text in value.items():
            if not isinstance(text, str):
                self._refuse(f"{key}.{name}", f"{text!r} is no text")
        return value

    def choice(self, kind: type[ChoiceT], key: str) -> ChoiceT:
        """A member of `kind`."""
        value = self.text(key)
        if value not in list(kind):
            self._refuse(key, f"{value!r} is none of {', '.join(kind)}")
        return kind(value)

    def number(self, key: str) -> float:
        """A finite number of 0 or more."""
        return self._number(key, self._take(key))

    def whole(self, key: str) -> int:
        """A whole number of 0 or more."""
        return self._bytes(key, self._take(key))

    def numbers(self, key: str) -> dict[str, float]:
        """Names and finite numbers of 0 or more."""
        value = self.mapping(key)
        return {name: self._number(f"{key}.{name}", number) for name, number in value.items()}

    def bytes_by(self, key: str, names: Iterable[str] | None = None) -> dict[str, int]:
        """Names, all of them among `names` unless that is None, and whole bytes."""
        value = self.mapping(key)
        for name in value:
            if names is not None and name not in names:
                self._refuse(f"{key}.{name}", f"none of {', '.join(names)}")
        return {name: self._bytes(f"{key}.{name}", size) for name, size in value.items()}

    def table(self, key: str, names: Iterable[str] | None = None) -> dict[str, dict[str, int]]:
        """A `bytes_by` for each of any names."""
        part = self.part(key)
        return {name: part.bytes_by(name, names) for name in part._raw}
