"""One command's keys: what is allowed, what it means, and how a wrong one is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from textwrap import fill

from src.errors import UserError, nearest, unknown_name

HELP_WIDTH = 110
"""Columns of the help; the list of what is allowed goes on in the next line."""


class ValueKind(StrEnum):
    """How the text after `key=` is read."""

    TEXT = "text"
    OPTIONAL_TEXT = "optional text"
    WORDS = "words"
    LITERAL = "literal"
    FILES = "files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key.

    Attributes:
        allowed: its values, in words.
        meaning: what it is; one short clause.
        kind: text is taken as it stands, words and files become a list, literals go through
            Hydra's grammar.
    """

    allowed: str
    meaning: str
    kind: ValueKind = ValueKind.LITERAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One command, `python -m src.<name>`.

    Attributes:
        name: its name; conf/<name>.yaml holds the defaults.
        question: what it answers, in a line.
        keys: every key.
        other_names: what a key is called elsewhere.
        group: the key that chooses one file of a folder of conf.
        options: those files.
        default_option: the file that conf/<name>.yaml takes.
        more_groups: further keys of that sort and their files, the one that is taken first.
        instead_of_sweeps: what to do instead of Hydra's multirun.
        free: keys whose inner names are free.
        fields: of keys that are no Python names, the schema's.
        examples: arguments of commands that are worth showing.
        ending: what the help says at its end.
    """

    name: str
    question: str
    keys: Mapping[str, Key]
    other_names: Mapping[str, str]
    group: str
    options: tuple[str, ...]
    default_option: str
    instead_of_sweeps: str
    free: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[str, ...]
    ending: str
    more_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Every key that chooses a file, and those files, the default one first."""
        others = [option for option in self.options if option != self.default_option]
        return {self.group: (self.default_option, *others), **self.more_groups}

    def field_of(self, key: str) -> str:
        """The schema's name of a key."""
        return self.fields.get(key, key)

    def is_free(self, key: str) -> bool:
        """Whether the key is one whose inner names are free, or such a name."""
        return key.partition(".")[0] in self.free

    def allowed_for(self, key: str) -> str:
        """What is allowed as a value of an existing key, in words."""
        return self.keys[key].allowed if key in self.keys else "a value of the config field"

    def kind_of(self, key: str) -> ValueKind:
        """How a value of the key is read."""
        return self.keys[key].kind if key in self.keys else ValueKind.LITERAL

    def check_key(self, key: str, value: object) -> None:
        """Raise UserError with the nearest key unless `key` exists."""
        if key in self.keys or ("." in key and self.is_free(key)):
            return
        plain = key.casefold().replace("-", "_")
        if plain in self.other_names:
            close = [self.other_names[plain]]
        else:
            parts = [name for name in self.keys if name.startswith(f"{plain}.")]
            close = parts or nearest(plain, self.keys, count=2)
        hint = f"did you mean {' or '.join(close)}?" if close else "--help lists every key"
        raise UserError(key=key, value=value, allowed=f"unknown key; {hint}")

    def choices(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """The files that `values` choose, as Hydra's overrides; default ones are left out.

        Raises:
            UserError: there is none of that name.
        """
        found = []
        for group, options in self.groups.items():
            option = str(values.get(group, options[0]))
            if option not in options:
                what = f"values of {group}"
                raise unknown_name(key=group, value=option, known=options, what=what)
            if option != options[0]:
                found.append(f"{group}={option}")
        return tuple(found)

    def _line(self, name: str, defaults: Mapping[str, str]) -> str:
        key = self.keys[name]
        meaning = f"; {key.meaning}" if key.meaning else ""
        default = f" [{defaults[name]}]" if name in defaults else ""
        text = f"  {name:<17} {key.allowed}{meaning}{default}"
        return fill(text, HELP_WIDTH, subsequent_indent=" " * 20, break_on_hyphens=False)

    def help_text(self, defaults: Mapping[str, str]) -> str:
        """The text of `--help`: a key, what is allowed, its default in brackets at the end."""
        command = f"python -m src.{self.name}"
        return "\n".join(
            [
                self.question,
                "",
                f"usage: {command} key=value ...",
                "",
                "Keys, with their defaults in brackets (quote an argument that has spaces):",
                *(self._line(name, defaults) for name in self.keys),
                "",
                "Examples:",
                *(f"  {command} {example}" for example in self.examples),
                "",
                self.ending,
                "--cfg job prints the composed configuration, --version the version.",
            ]
        )
