"""Models and GPUs that ship with the program, found by any of their names, whatever the case."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from src.errors import nearest

CONF = Path(__file__).resolve().parents[2] / "conf"
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=2)
def index(kind: str) -> dict[str, list[str]]:
    """Name -> its other names, the hub id or device name first; `kind` is `model` or `gpu`."""
    table: dict[str, list[str]] = json.loads((CONF / kind / "index.json").read_text("utf-8"))
    return table


@lru_cache(maxsize=2)
def _by_any_name(kind: str) -> dict[str, str]:
    return {
        written.casefold(): name
        for name, others in index(kind).items()
        for written in (name, *others)
    }


def find(kind: str, written: str) -> str | None:
    """The name of the entry that is called `written`; None where there is none.

    Case is ignored; dashes, underscores and spaces too, where only one entry is meant then.
    """
    exact = _by_any_name(kind).get(written.casefold())
    if exact is not None:
        return exact
    meant = {
        name for other, name in _by_any_name(kind).items() if _squeezed(other) == _squeezed(written)
    }
    return meant.pop() if len(meant) == 1 else None


def _squeezed(name: str) -> str:
    return name.casefold().replace("-", "").replace("_", "").replace(" ", "")


def all_names(kind: str) -> list[str]:
    """Every way to write an entry, names first."""
    table = index(kind)
    return [*table, *(other for others in table.values() for other in others)]


def nearest_names(kind: str, written: str) -> list[str]:
    """Names of the entries that have a name like `written`, best first, at most three."""
    similar = nearest(written, all_names(kind), count=8)
    return list(dict.fromkeys(_by_any_name(kind)[other.casefold()] for other in similar))[:3]


def load(kind: str, name: str) -> dict[str, Any]:
    """The fields of conf/<kind>/<name>.yaml."""
    with (CONF / kind / f"{name}.yaml").open(encoding="utf-8") as stream:
        entry: dict[str, Any] = yaml.load(stream, Loader=_Loader)
    return entry
