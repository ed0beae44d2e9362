"""Types of every key of conf/estimate.yaml; Hydra refuses a value of another type.

Values that are chosen from a set are plain strings here: Hydra matches enums by member name, and
the names a user types (`bf16-mixed`) are no Python names. `request.py` reads them.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class FinetuneConfig:
    """The group `finetune`; None where the kind has no such option."""

    kind: str = MISSING
    r: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    targets: list[str] | None = None
    dora: bool | None = None
    quantization: str | None = None
    double_quant: bool | None = None
    upcast: str | None = None
    trained_blocks: int | None = None
    num_virtual_tokens: int | None = None


@dataclass
class ZeroConfig:
    """DeepSpeed's buffer sizes in elements."""

    reduce_bucket_size: int = MISSING
    prefetch_bucket_size: int = MISSING
    param_persistence_threshold: int = MISSING
    max_live_parameters: int = MISSING
    fp32_gradients: bool = MISSING


@dataclass
class DryRunConfig:
    """How the dry run is run."""

    time_limit_s: int = MISSING


@dataclass
class EstimateConfig:
    """Every key of `src.estimate`; values and defaults are in conf/estimate.yaml."""

    model: str = MISSING
    arch: dict[str, Any] = field(default_factory=dict)
    gpus: int = MISSING
    gpus_per_node: int | None = None
    gpu: str = MISSING
    internode_gbps: float = MISSING
    method: builtins.list[str] = MISSING
    tp: int | None = None
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    precision: str = MISSING
    optimizer: str = MISSING
    seq_len: Any = MISSING
    micro_batch: int | None = None
    grad_accum: int = MISSING
    checkpointing: str = MISSING
    checkpoint_every: int = MISSING
    attention: str = MISSING
    loss: str = MISSING
    offload: str = MISSING
    activation_offload: bool = MISSING
    sequence_parallel: bool = MISSING
    vocab_parallel: bool = MISSING
    fp32_reduce: bool = MISSING
    estimator: str = MISSING
    champion: str | None = None
    runtime: str | None = None
    policy: str = MISSING
    solve: str | None = None
    layouts: str | None = None
    measured: str | None = None
    dryrun: DryRunConfig = field(default_factory=DryRunConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    trust_remote_code: bool = False
    format: str = MISSING
    plot: str | None = None
    snapshot: str | None = None
    report: str | None = None
    list: str | None = None
