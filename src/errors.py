"""The one kind of error that is for people: bad input, told in one line."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LISTED = ("model", "gpu", "method")
"""Keys whose values `list=` prints."""


class UserError(Exception):
    """The input is wrong. Commands print it as one line on stderr and exit with 1.

    Args:
        key: the key as the user writes it (`gpus`, `finetune.r`, a config field).
        value: the value that was given.
        allowed: what is allowed instead, in words; ends without a full stop.
    """

    def __init__(self, *, key: str, value: object, allowed: str) -> None:
        super().__init__(" ".join(f"{key}={value}: {allowed}".split()))
        self.key = key
        self.value = value
        self.allowed = allowed


class NotCoveredError(UserError):
    """The estimator does not cover this step; another may, and it may cover other methods."""


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Names of `known` that look like `name`, best first, at most `count`; case is ignored."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[match] for match in matches]


def unknown_name(*, key: str, value: str, known: Iterable[str], what: str) -> UserError:
    """The error for a name that is not among `known`: the nearest names, or how many there are.

    Args:
        key: the key as the user writes it.
        value: the unknown name.
        known: every allowed name.
        what: what the names are, in the plural ("models of the zoo").
    """
    names = list(known)
    close = nearest(value, names)
    if close:
        return UserError(
            key=key, value=value, allowed=f"not among the {what}; nearest: {', '.join(close)}"
        )
    if len(names) <= 12:
        return UserError(key=key, value=value, allowed=f"allowed: {', '.join(names)}")
    allowed = f"not among the {len(names)} {what}: {', '.join(names)}"
    if key in LISTED:
        allowed = f"not among the {len(names)} {what}; list={key}s prints them"
    return UserError(key=key, value=value, allowed=allowed)
