"""What a public report claims of one fine-tuning run, and the request of ours that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import Any


class Happened(Enum):
    """What became of the run."""

    RAN = "ran"
    OOM = "out of memory"


@dataclass(frozen=True, kw_only=True)
class Number:
    """Bytes that a report gives, at its level; nvidia-smi's where it does not say."""

    bytes: float
    level: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One run of a report.

    Attributes:
        report: its id.
        happened: what became of it.
        keys: the request, as `src.estimate.estimate` takes it.
        unknown: settings that the report leaves open, each with its plausible values.
        number: bytes it took.
        decided: whether all plausible settings have to give what happened; else one of them.
        host_bytes: host memory of the whole node that did not suffice.
        filled: what was filled in, and from where.
    """

    report: str
    happened: Happened
    keys: Mapping[str, Any]
    unknown: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    number: Number | None = None
    decided: bool = True
    host_bytes: float | None = None
    filled: str

    def requests(self) -> list[dict[str, Any]]:
        """One request per combination of the settings left open."""
        names = list(self.unknown)
        return [
            {**self.keys, **dict(zip(names, values, strict=True)), "estimator": "formula"}
            for values in product(*self.unknown.values())
        ]


def lora(r: int, targets: tuple[str, ...] = ("q_proj", "v_proj"), **keys: Any) -> dict[str, Any]:
    return {"kind": "lora", "r": r, "targets": list(targets), **keys}


def qlora(r: int, targets: tuple[str, ...] = ("all-linear",), **keys: Any) -> dict[str, Any]:
    return {**lora(r, targets, **keys), "kind": "qlora"}
