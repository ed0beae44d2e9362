"""The command line, before Hydra's grammar reads it.

A name or a path is taken as it was typed (Hydra would make `1_1_1` a number and stop at `=`, a
space or a bracket), words separated by commas are a list, and a key that does not exist is refused
with the nearest one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Quote, QuotedString

from src.config.keys import KEYS, ValueKind, check_key
from src.errors import UserError


def split_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Key -> value as typed; the last of two equal keys counts.

    Raises:
        UserError: an argument is not of the form key=value, or its key does not exist.
    """
    typed: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith("-"):
            raise _flag_error(argument)
        key, separator, value = argument.lstrip("+").partition("=")
        if not separator:
            raise UserError(
                key="argument",
                value=argument,
                allowed="not key=value; quote an argument with spaces: 'model=my model'",
            )
        check_key(key, value)
        typed[key] = value
    return typed


def _flag_error(argument: str) -> UserError:
    name = argument.partition("=")[0]
    if name in ("-m", "--multirun"):
        allowed = "one query a run; compare methods with method=[fsdp,zero3]"
        return UserError(key="option", value=argument, allowed=allowed)
    key = name.lstrip("-").replace("-", "_")
    hint = f"{key}=..." if key in KEYS else "--help lists every key"
    return UserError(key="option", value=argument, allowed=f"options are written key=value; {hint}")


def as_override(key: str, value: str) -> str:
    """One override in Hydra's grammar."""
    if key == "arch" or key.startswith("arch."):
        return f"++{key}={value}"
    kind = KEYS[key].kind
    if kind is ValueKind.WORDS and not value.startswith("["):
        return f"{key}=[{value}]"
    if kind is ValueKind.OPTIONAL_TEXT and value == "null":
        return f"{key}=null"
    if kind in (ValueKind.TEXT, ValueKind.OPTIONAL_TEXT):
        return f"{key}={_quoted(value)}"
    return f"{key}={value}"


def _quoted(value: str) -> str:
    """The text as Hydra's grammar quotes it; quotes that the user put there stay."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value
    return QuotedString(text=value, quote=Quote.single).with_quotes()
