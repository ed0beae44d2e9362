"""A file of somebody else as plain values: YAML by its safe loader, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from src.errors import UserError

_MAX_BYTES = 1024**2
_MAX_NESTING = 40
_MAX_TOLD = 60
_MAX_NAME = 300
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def file_error(file: str, reason: str) -> UserError:
    """The error about a file as a whole."""
    return UserError(key="from", value=told_file(file), allowed=reason)


def told(value: object) -> str:
    """A value in a message: printable, one line, short; of what is nested only that it is."""
    if isinstance(value, Mapping):
        return "{...}"
    if isinstance(value, list):
        is_plain = len(value) <= 8 and not any(isinstance(one, list | Mapping) for one in value)
        return f"[{','.join(told(one) for one in value)}]" if is_plain else "[...]"
    line = str(value).lower() if isinstance(value, bool) else str(value)
    return _short(line, _MAX_TOLD)


def told_file(file: object) -> str:
    """A file's name in a message: printable, one line."""
    return _short(str(file), _MAX_NAME)


def _short(line: str, most: int) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in line)
    return line if len(line) <= most else f"{line[:most]}..."


def read_mapping(file: str, path: Path) -> dict[str, Any]:
    """The mapping that a file holds; every key is text.

    Raises:
        UserError: there is none that can be read; one line says why.
    """
    content = _parse(file, path, _read(file, path))
    if content is None:
        raise file_error(file, "the file is empty")
    if not isinstance(content, dict):
        raise file_error(file, f"holds no keys but a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _read(file: str, path: Path) -> str:
    try:
        if not path.is_file():
            raise file_error(file, "a folder" if path.is_dir() else "there is no such file")
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no name of a file"
        raise file_error(file, f"cannot be read ({reason})") from error
    if len(content) > _MAX_BYTES:
        raise file_error(file, "larger than 1 MiB, which no configuration is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise file_error(file, "no text in UTF-8") from error
    if "\0" in text:
        raise file_error(file, "no text but binary")
    return text


def _parse(file: str, path: Path, text: str) -> Any:
    if path.suffix.casefold() == ".json" or text.lstrip().startswith("{"):
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise file_error(file, f"no JSON ({error})") from error
    try:
        _check_nesting(file, text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "damaged"
        raise file_error(file, f"no YAML ({told(problem)}{where})") from error


def _check_nesting(file: str, text: str) -> None:
    """The loader recurses in C, where Python's limit does not hold: look at the events first."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        is_start = isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent)
        is_end = isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent)
        depth += is_start - is_end
        if depth > _MAX_NESTING:
            raise file_error(file, f"nested deeper than {_MAX_NESTING} levels")


def flatten(content: Mapping[str, Any], whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Nested keys as `a.b`; the keys of `whole` as they are, an empty mapping as null."""
    yield from _flatten("", content, whole, 0)


def _flatten(
    prefix: str, content: Mapping[Any, Any], whole: frozenset[str], depth: int
) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_nested = isinstance(value, Mapping) and key not in whole and depth < 3
        if is_nested and value:
            yield from _flatten(f"{key}.", value, whole, depth + 1)
        else:
            yield key, None if value == {} else value
