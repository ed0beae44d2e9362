"""The command line: `key=value` arguments to plain values.

A name or a path is taken as it was typed (Hydra's grammar would make `1_1_1` a number and stop at
`=`, a space or a bracket), words separated by commas are a list, and everything else that is no
whole number goes through Hydra's grammar. Parsing costs that grammar 5 ms a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from src.config.keys import ESTIMATE
from src.config.program import Program, ValueKind
from src.errors import UserError

_WHOLE_NUMBER = re.compile(r"[+-]?\d+")


def split_arguments(arguments: Sequence[str], program: Program = ESTIMATE) -> dict[str, str]:
    """Key -> value as typed; the last of two equal keys counts.

    Raises:
        UserError: an argument is not of the form key=value, or its key does not exist.
    """
    typed: dict[str, str] = {}
    for argument in arguments:
        if argument.startswith("-"):
            raise _flag_error(argument, program)
        key, separator, value = argument.lstrip("+").partition("=")
        if not separator:
            raise UserError(
                key="argument",
                value=argument,
                allowed="not key=value; quote an argument with spaces: 'model=my model'",
            )
        # A script with Windows' line ends leaves one at the end of its last argument.
        value = value.removesuffix("\r")
        program.check_key(key, value)
        typed[key] = value
    return typed


def _flag_error(argument: str, program: Program) -> UserError:
    name = argument.partition("=")[0]
    if name in ("-m", "--multirun"):
        allowed = f"no sweeps; {program.instead_of_sweeps}"
        return UserError(key="option", value=argument, allowed=allowed)
    key = name.lstrip("-").replace("-", "_")
    hint = f"{key}=..." if key in program.keys else "--help lists every key"
    return UserError(key="option", value=argument, allowed=f"options are written key=value; {hint}")


def parse_value(key: str, text: str, program: Program = ESTIMATE) -> Any:
    """The value that `text` stands for after `key=`.

    Raises:
        UserError: Hydra's grammar cannot read it, or it is a sweep.
    """
    kind, allowed = program.kind_of(key), program.allowed_for(key)
    if kind is ValueKind.OPTIONAL_TEXT and text == "null":
        return None
    if kind is ValueKind.FILES:
        is_list = text.startswith("[") and text.endswith("]")
        return [file.strip() for file in text[1:-1].split(",")] if is_list else text
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if kind in (ValueKind.TEXT, ValueKind.OPTIONAL_TEXT) and not is_quoted:
        return text
    if kind is ValueKind.LITERAL and _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if kind is ValueKind.WORDS and not text.startswith("["):
        return _by_grammar(key, f"[{text}]", text, allowed)
    return _by_grammar(key, text, text, allowed)


def _by_grammar(key: str, text: str, typed: str, allowed: str) -> Any:
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
    except HydraException as error:
        words = f"cannot be read, quote what is text; allowed: {allowed}"
        raise UserError(key=key, value=typed, allowed=words) from error
    if override.is_sweep_override():
        raise UserError(key=key, value=typed, allowed=f"one value: {allowed}")
    return override.value()
