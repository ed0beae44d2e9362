"""The group `launcher`: where a campaign's cases are run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from src.config.profile_keys import CLUSTERS, PROFILE
from src.errors import UserError, unknown_name
from src.launch import Jobs
from src.launch.submission import read_options
from src.spec.job import require_positive

_START_MINUTES = 5
"""Of a job's time limit, for what comes before and after the case."""


def is_slurm(keys: Mapping[str, Any]) -> bool:
    """Whether each case is a job."""
    return bool(keys["launcher"]["kind"] == "slurm")


def to_jobs(keys: Mapping[str, Any], *, rows: Path, timeout_s: float) -> Jobs | None:
    """The jobs that the cases become; None: none.

    Args:
        keys: the whole configuration.
        rows: the campaign's file; its jobs' files are beside it unless asked otherwise.
        timeout_s: seconds that one case may take.

    Raises:
        UserError: a value is not allowed.
    """
    mine = keys["launcher"]
    if not is_slurm(keys):
        for name, value in mine.items():
            if name != "kind" and value is not None:
                key = f"launcher.{name}"
                raise UserError(key=key, value=value, allowed="only with launcher=slurm")
        return None
    if mine["cluster"] not in CLUSTERS:
        raise unknown_name(
            key="launcher.cluster", value=mine["cluster"], known=CLUSTERS, what="clusters"
        )
    for name in ("gpus_per_node", "max_jobs"):
        _require_count(mine, name)
    if mine["minutes"] is not None:
        require_positive("launcher.minutes", mine["minutes"])
    if mine["cluster"] == "local" and keys["device"] == "cuda" and mine["max_jobs"] > 1:
        allowed = "1 with device=cuda and launcher.cluster=local: its jobs share the GPUs"
        raise UserError(key="launcher.max_jobs", value=mine["max_jobs"], allowed=allowed)
    folder = mine["folder"]
    return Jobs(
        cluster=mine["cluster"],
        folder=(Path(folder).expanduser() if folder else rows.with_suffix(".jobs")).absolute(),
        max_jobs=mine["max_jobs"],
        gpus_per_node=mine["gpus_per_node"],
        minutes=mine["minutes"] or math.ceil(timeout_s / 60) + _START_MINUTES,
        partition=mine["partition"],
        account=mine["account"],
        qos=mine["qos"],
        constraint=mine["constraint"],
        sbatch=read_options(mine["sbatch"] or ""),
    )


def _require_count(mine: Mapping[str, Any], name: str) -> None:
    key = f"launcher.{name}"
    if mine[name] is None:
        raise UserError(key=key, value="null", allowed=PROFILE.allowed_for(key))
    require_positive(key, mine[name])
