"""Types of every key of conf/profile.yaml; Hydra refuses a value of another type.

As in `schema.py`, values chosen from a set are plain strings here, and `campaign.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class CampaignConfig:
    """The group `campaign`: what a campaign's cases are spread over."""

    name: str = MISSING
    gpu: str = MISSING
    models: list[str] = MISSING
    methods: list[str] = MISSING
    num_gpus: list[int] = MISSING
    finetunes: list[str] = MISSING
    precisions: list[str] = MISSING
    optimizers: list[str] = MISSING
    checkpointings: list[str] = MISSING
    attentions: list[str] = MISSING
    seq_lens: list[int] = MISSING
    fill: list[float] = MISSING
    beyond: float = MISSING
    num_cases: int = MISSING
    budget_minutes: float | None = None
    timeout_s: int = MISSING


@dataclass
class TrackingConfig:
    """Where rows are logged."""

    uri: str | None = None


@dataclass
class LauncherConfig:
    """The group `launcher`: where cases are run."""

    kind: str = MISSING
    cluster: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    minutes: int | None = None
    gpus_per_node: int | None = None
    max_jobs: int | None = None
    sbatch: str | None = None
    folder: str | None = None


@dataclass
class ProfileConfig:
    """Every key of `src.profile`; values and defaults are in conf/profile.yaml."""

    campaign: CampaignConfig = field(default_factory=CampaignConfig)
    device: str = MISSING
    gpu: str = MISSING
    budget_minutes: float | None = None
    timeout_s: int | None = None
    seed: int = MISSING
    out: str | None = None
    plan_only: bool = MISSING
    cases: str | None = None
    sync: bool = MISSING
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    imported: list[str] = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
