"""What a format's table is made of: what becomes of a key of somebody else's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class NotRepresentedError(Exception):
    """A value that nothing of ours stands for; the text says what there is instead."""


@dataclass(frozen=True, slots=True)
class Take:
    """The key sets a fact.

    Attributes:
        fact: one of our keys, or a word of `settle.py` that is settled together with others.
        convert: the fact's value from the file's; None: it says nothing. Raises
            NotRepresentedError.
    """

    fact: str
    convert: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Warn:
    """The key matters for memory and is not counted: a warning where it is switched on."""

    reason: str
    unless: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """An answer would be about another job: an error where the key is switched on."""

    reason: str
    unless: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Companion:
    """The key names, or holds, a DeepSpeed config."""


Rule = Take | Warn | Refuse | Companion


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Format:
    """One kind of file.

    Attributes:
        name: as people call it.
        marks: keys by which it is recognised.
        rules: what becomes of a key; nested keys are dotted.
        harmless: keys without effect on the memory of a training step; a nested one with all in it.
        harmless_starts: how the names of further such keys start.
        defaults: facts that hold where the files say nothing.
        caveat: what is worth knowing of those.
        is_training: whether it describes the training, and not only how it is launched.
    """

    name: str
    marks: frozenset[str]
    rules: Mapping[str, Rule]
    harmless: frozenset[str]
    harmless_starts: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    caveat: str = ""
    is_training: bool = True

    def is_harmless(self, key: str) -> bool:
        """Whether a key, or one that holds it, has no effect on memory."""
        parts = key.split(".")
        holders = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return bool(holders & self.harmless) or key.startswith(self.harmless_starts or ("\0",))


def names(written: str) -> frozenset[str]:
    """Names parted by blanks."""
    return frozenset(written.split())


_ON = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False}


def switch(value: Any) -> bool:
    """A switch, also where it is written as text."""
    if isinstance(value, bool):
        return value
    found = _ON.get(str(value).casefold())
    if not isinstance(value, str | int) or found is None:
        raise NotRepresentedError("true or false")
    return found


def whole(value: Any) -> int | None:
    """A whole number, also as `5e8` or text; None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise NotRepresentedError("a whole number")
    try:
        number = value if isinstance(value, int) else float(value)
    except ValueError as error:
        raise NotRepresentedError("a whole number") from error
    if number != number or abs(number) > 2**63 or number != int(number):
        raise NotRepresentedError("a whole number")
    return int(number)


def fraction(value: Any) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise NotRepresentedError("a number")
    try:
        return float(value)
    except ValueError as error:
        raise NotRepresentedError("a number") from error


def text(value: Any) -> str:
    """Text, and not empty."""
    if not isinstance(value, str) or not value.strip():
        raise NotRepresentedError("text")
    return value


def words(value: Any) -> list[str]:
    """A list of words, also where it is written with commas."""
    found = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise NotRepresentedError("a list of names")
    return list(found)


def one_of(table: Mapping[str, Any], hint: str = "") -> Callable[[Any], Any]:
    """A converter by table; case, blanks and `-` for `_` do not matter."""

    def convert(value: Any) -> Any:
        is_plain = isinstance(value, str | int | float | bool)
        name = str(value).strip().casefold().replace("-", "_") if is_plain else ""
        if name not in table:
            known = ", ".join(table)
            raise NotRepresentedError(f"{hint}known: {known}")
        return table[name]

    return convert


def when(is_on: Any, is_off: Any = None) -> Callable[[Any], Any]:
    """A converter of a switch."""
    return lambda value: is_on if switch(value) else is_off


def lora_targets(value: Any) -> list[str]:
    """Names of Linears; `all` and `all-linear` mean every one of the blocks."""
    found = words(value)
    if [name.casefold() for name in found] in (["all"], ["all-linear"]):
        return ["all-linear"]
    if any(not name.replace("_", "").replace(".", "").isalnum() for name in found):
        raise NotRepresentedError(
            "names of Linears; regular expressions are not read, type finetune.targets=[...]"
        )
    return [name.rpartition(".")[2] for name in found]
