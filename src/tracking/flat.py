"""A row as MLflow takes it: flat parameters, metrics and tags."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from src.record import LEVELS, SCHEMA_VERSION, Outcome, Row
from src.units import Levels

MOST_CHARACTERS = 6000
"""Of a parameter's value; MLflow cuts or refuses longer ones. Tags are cut the same."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_\-. :/]")
_TAGGED_ENVIRONMENT = ("driver", "cuda", "allocator_config", "platform")


def params(row: Row) -> dict[str, str]:
    """The whole spec, one parameter for each value in it, `model.config.hidden_size` and so on."""
    return {_name(key): _text(value) for key, value in _leaves("", row.case)}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _name(key: str) -> str:
    return _NOT_IN_A_NAME.sub("_", key)[:250]


def metrics(row: Row, compared: Mapping[str, Levels]) -> dict[str, float]:
    """Bytes by level and instant, everything counted or timed, and each estimator's error.

    An error is estimate / row - 1 at one level, of steps that ran; no metric is NaN.

    Args:
        row: the row.
        compared: estimator -> what it says of the row's case.
    """
    found: dict[str, float] = {"duration_s": row.provenance.duration_s, **row.numbers}
    found |= {f"{level}_bytes": size for level, size in row.peak_bytes.items()}
    for instant, levels in row.instants.items():
        found |= {f"{instant}_{level}_bytes": size for level, size in levels.items()}
    capacity = capacity_bytes(row)
    if capacity and "device" in row.peak_bytes:
        found["fill"] = row.peak_bytes["device"] / capacity
    for estimator, estimate in compared.items():
        for level in LEVELS:
            said, seen = getattr(estimate, level), row.peak_bytes.get(level)
            found[f"{estimator}_{level}_bytes"] = said
            if seen and row.outcome is Outcome.OK:
                found[f"{estimator}_{level}_error"] = said / seen - 1
    return {_name(key): float(value) for key, value in found.items() if math.isfinite(value)}


def capacity_bytes(row: Row) -> float | None:
    """Usable bytes of the row's GPU, where its case says."""
    usable = row.case.get("gpu", {}).get("usable_gib")
    return None if usable is None else usable * 2**30


def tags(row: Row) -> dict[str, str]:
    """What runs are found by."""
    provenance = row.provenance
    found = {
        "row_id": row.row_id,
        "case_id": row.case_id,
        "schema_version": str(SCHEMA_VERSION),
        "campaign": provenance.campaign,
        "source": row.source.value,
        "outcome": row.outcome.value,
        "gpu": sku(row),
        "comm": row.comm,
        "git_commit": provenance.git_commit,
        "url": provenance.url,
        "message": row.message,
        "oom_instant": row.oom_instant,
        "peak_instant": row.peak_instant,
        **{f"version.{name}": version for name, version in row.versions.items()},
        **{name: row.environment.get(name) for name in _TAGGED_ENVIRONMENT},
    }
    return {_name(key): _text(value) for key, value in found.items() if value is not None}


def sku(row: Row) -> str:
    """Short name of the row's GPU."""
    return str(row.case.get("gpu", {}).get("sku", "a100-80gb"))


def title(row: Row) -> str:
    """The name of the row's run."""
    case = row.case
    layout = case.get("layout", {})
    degrees = " ".join(f"{key}{layout[key]}" for key in ("dp", "tp") if layout.get(key, 1) > 1)
    words = (
        case.get("model", {}).get("name", "model"),
        case.get("method", "single"),
        degrees,
        f"seq{case.get('seq_len', 512)}",
        f"batch{case.get('micro_batch', 1)}",
    )
    return " ".join(str(word) for word in words if word)


def table_line(row: Row) -> dict[str, Any]:
    """The row as one line of a flat table."""
    return {
        **params(row),
        **{key: value for key, value in tags(row).items() if key != "message"},
        **metrics(row, {}),
    }
