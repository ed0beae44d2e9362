"""The formula: what is alive at each instant of a training step, in closed form. No torch."""

from __future__ import annotations

from src.memory.columns import columns
from src.memory.counts import count_model
from src.memory.estimate import (
    Estimate,
    Ledger,
    estimate_step,
    host_activation_bytes,
    ledger_of,
    peak_allocated,
    stranded_allocated,
)
from src.memory.kernels import Kernel, choose_kernel, implementation
from src.memory.levels import LevelModel, level_model
from src.memory.llmem import llmem_step
from src.memory.mixed_dtypes import mixed_dtypes
from src.memory.sequence_limits import unsplit_adapters, whole_experts
from src.memory.terms import Instant, Term
from src.memory.tuning import check_trained_blocks, is_target
from src.memory.vocab_limits import scaled_table, uneven_vocabulary

__all__ = [
    "Estimate",
    "Instant",
    "Kernel",
    "Ledger",
    "LevelModel",
    "Term",
    "check_trained_blocks",
    "choose_kernel",
    "columns",
    "count_model",
    "estimate_step",
    "host_activation_bytes",
    "implementation",
    "is_target",
    "ledger_of",
    "level_model",
    "llmem_step",
    "mixed_dtypes",
    "peak_allocated",
    "stranded_allocated",
    "scaled_table",
    "uneven_vocabulary",
    "unsplit_adapters",
    "whole_experts",
]
