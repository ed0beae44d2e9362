"""`seq_len=FILE`: the lengths of a data set's sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.spec import Lengths

ALLOWED = "tokens, 1 or more, or a file of lengths: one per line, or a JSON list"


def resolve_seq_len(value: Any) -> tuple[int, Lengths | None]:
    """The sequence length to plan for, and the lengths that it is the longest of.

    Raises:
        UserError: it is neither a number nor a readable file of lengths.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value, None
    if not isinstance(value, str):
        raise UserError(key="seq_len", value=value, allowed=ALLOWED)
    lengths = Lengths.of(_read(value))
    return lengths.longest, lengths


def _read(written: str) -> list[int]:
    try:
        text = Path(written).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(key="seq_len", value=written, allowed=f"{ALLOWED} ({reason})") from error
    if text.lstrip().startswith("["):
        items = _json_list(written, text)
        where = "item"
    else:
        items = text.split()
        where = "number"
    if not items:
        raise UserError(key="seq_len", value=written, allowed=f"{ALLOWED} (it is empty)")
    return [_length(written, item, f"{where} {place}") for place, item in enumerate(items, 1)]


def _json_list(written: str, text: str) -> list[Any]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise UserError(key="seq_len", value=written, allowed=f"{ALLOWED} ({error})") from error
    return list(items)


def _length(written: str, item: Any, place: str) -> int:
    """A whole number, 1 or more; `place` says where it stands."""
    is_whole = isinstance(item, int) and not isinstance(item, bool)
    if isinstance(item, str) and item.isdecimal():
        item, is_whole = int(item), True
    if not is_whole or item < 1:
        raise UserError(
            key="seq_len", value=written, allowed=f"{ALLOWED} ({place} is {item!r:.40})"
        )
    return int(item)
