"""What is asked: model, job, cluster; frozen and checked. Imports nothing beyond itself."""

from __future__ import annotations

from src.spec.choices import (
    Attention,
    Checkpointing,
    EstimatorKind,
    FinetuneKind,
    Loss,
    Method,
    Optimizer,
    Policy,
    Precision,
    Verdict,
    parse_choice,
)
from src.spec.hardware import Cluster, Gpu, Interconnect
from src.spec.job import Finetune, Job, Layout, Step, ZeroBuffers
from src.spec.model import Model
from src.spec.request import DRY_RUN_LIMIT_S, Request

__all__ = [
    "DRY_RUN_LIMIT_S",
    "Attention",
    "Checkpointing",
    "Cluster",
    "EstimatorKind",
    "Finetune",
    "FinetuneKind",
    "Gpu",
    "Interconnect",
    "Job",
    "Layout",
    "Loss",
    "Method",
    "Model",
    "Optimizer",
    "Policy",
    "Precision",
    "Request",
    "Step",
    "Verdict",
    "ZeroBuffers",
    "parse_choice",
]
