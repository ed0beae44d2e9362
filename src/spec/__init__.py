"""What is asked: model, job, cluster; frozen and checked. Imports nothing beyond itself."""

from __future__ import annotations

from src.spec.choices import (
    Attention,
    Checkpointing,
    EstimatorKind,
    FinetuneKind,
    Loss,
    Method,
    Offload,
    Optimizer,
    Policy,
    Precision,
    Quantization,
    Runtime,
    Unknown,
    Upcast,
    Verdict,
    parse_choice,
)
from src.spec.hardware import Cluster, Gpu, Interconnect
from src.spec.job import FINETUNE_OPTIONS, Finetune, Job, Layout, Step, ZeroBuffers
from src.spec.lengths import Lengths
from src.spec.model import Model
from src.spec.request import DRY_RUN_LIMIT_S, Request
from src.spec.rules import refusal, uneven_sequence

__all__ = [
    "DRY_RUN_LIMIT_S",
    "FINETUNE_OPTIONS",
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
    "Lengths",
    "Loss",
    "Method",
    "Model",
    "Offload",
    "Optimizer",
    "Policy",
    "Precision",
    "Quantization",
    "Request",
    "Runtime",
    "Step",
    "Unknown",
    "Upcast",
    "Verdict",
    "ZeroBuffers",
    "parse_choice",
    "refusal",
    "uneven_sequence",
]
