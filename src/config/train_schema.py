"""Types of every key of conf/train.yaml; Hydra refuses a value of another type.

As in `schema.py`, values chosen from a set are plain strings here, and `training.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from src.config.profile_schema import TrackingConfig


@dataclass
class TreesConfig:
    """How trees are grown."""

    rounds: int = MISSING
    learning_rate: float = MISSING
    leaves: int = MISSING
    min_rows_per_leaf: int = MISSING
    l2: float = MISSING
    seed: int = MISSING


@dataclass
class ResidualConfig:
    """The group `residual`: how corrections are fitted and judged."""

    coverage: float = MISSING
    min_rows: int = MISSING
    min_families: int = MISSING
    kinds: list[str] = MISSING
    ridge_penalty: float = MISSING
    trees: TreesConfig = field(default_factory=TreesConfig)


@dataclass
class TrainConfig:
    """Every key of `src.train`; values and defaults are in conf/train.yaml."""

    residual: ResidualConfig = field(default_factory=ResidualConfig)
    rows: list[str] = MISSING
    sources: list[str] = MISSING
    gpus: list[str] = MISSING
    versions: list[str] = MISSING
    check: bool = MISSING
    rollback: bool = MISSING
    out: str | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
