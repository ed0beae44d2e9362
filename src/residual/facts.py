"""What a correction sees of one step: numbers of the spec, the ledger and the GPU, and no names.

Features are a fixed tuple, so that no column can be taken for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from src.architecture import describe
from src.memory import Estimate, Instant, Ledger, Term, count_model
from src.memory.estimate import LOSS_BLOCKS
from src.memory.outside import outside_bytes
from src.record import LEVELS
from src.spec import Checkpointing, Finetune, Model, Step
from src.units import Levels

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One number.

    Attributes:
        name: what it is; `log2_*` count doublings, `*_share` are parts of the peak.
        reach: how far outside what was seen the correction has faded away.
        rises: whether more reserved than the formula says can only become more (1), less (-1), or
            both (0) as it grows, all else being equal.
    """

    name: str
    reach: float
    rises: int = 0


FEATURES: tuple[Feature, ...] = (
    Feature(name="log2_tokens", reach=1.5),
    Feature(name="log2_seq_len", reach=1.5),
    Feature(name="log2_parameters", reach=1.5),
    Feature(name="log2_hidden", reach=1.5),
    Feature(name="log2_vocab", reach=1.5),
    Feature(name="log2_blocks", reach=1.5),
    Feature(name="has_experts", reach=0.5),
    Feature(name="trained_share", reach=0.5),
    Feature(name="is_adapted", reach=0.5),
    Feature(name="is_quantized", reach=0.5),
    Feature(name="compute_bytes", reach=1.0),
    Feature(name="is_autocast", reach=0.5),
    Feature(name="is_checkpointed", reach=0.5),
    Feature(name="optimizer_states", reach=1.0),
    Feature(name="log2_dp", reach=2.0),
    Feature(name="log2_tp", reach=1.0),
    Feature(name="log2_shard", reach=2.0),
    Feature(name="has_several_streams", reach=0.5),
    Feature(name="static_share", reach=0.5),
    Feature(name="logits_share", reach=0.5),
    Feature(name="activations_share", reach=0.5),
    Feature(name="gathered_share", reach=0.5),
    Feature(name="temporaries_share", reach=0.5),
    Feature(name="unshared_share", reach=0.5, rises=1),
    Feature(name="loss_block_share", reach=0.2, rises=1),
    Feature(name="outside_share", reach=0.5),
    Feature(name="fill", reach=0.25, rises=-1),
    Feature(name="log2_capacity", reach=0.75),
    Feature(name="log2_sm_count", reach=0.75),
    Feature(name="compute_capability", reach=1.0),
)
"""Every feature, in the order of a row of `Table.features`."""

NAMES = tuple(feature.name for feature in FEATURES)

_SHARES = {
    "static_share": (Term.WEIGHTS, Term.MASTER_WEIGHTS, Term.GRADIENTS, Term.OPTIMIZER_STATES),
    "logits_share": (Term.LOGITS, Term.LOSS_TEMPORARIES),
    "activations_share": (
        Term.CHECKPOINTS,
        Term.SAVED_ACTIVATIONS,
        Term.DROPOUT_MASKS,
        Term.ATTENTION_SCORES,
        Term.ATTENTION_MASK,
        Term.ACTIVATION_GRADIENTS,
    ),
    "gathered_share": (
        Term.GATHERED_WEIGHTS,
        Term.CAST_WEIGHTS,
        Term.UNSHARDED_GRADIENTS,
        Term.COMMUNICATION_BUFFERS,
    ),
    "temporaries_share": (Term.OPTIMIZER_TEMPORARIES, Term.WORKSPACES, Term.INPUTS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a correction sees of one step.

    Attributes:
        formula: the formula's peak, in bytes.
        upper: its upper bound, in bytes.
        unshared: bytes by which the terms' own maxima exceed the peak: what would be reserved if no
            instant used again what another one freed.
        loss_block: one block as large as those that the loss makes, in bytes.
        outside: CUDA context and NCCL, in bytes.
        capacity: usable bytes of the GPU.
        has_several_streams: whether gathers and reductions run beside the computation.
        features: the numbers of `FEATURES`, in that order.
    """

    formula: Levels
    upper: Levels
    unshared: int
    loss_block: int
    outside: int
    capacity: int
    has_several_streams: bool
    features: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The facts of n steps, by column.

    Attributes:
        formula, upper: level -> bytes, each of shape (n,).
        unshared, loss_block, outside, capacity: bytes, each of shape (n,).
        has_several_streams: 0 or 1, of shape (n,).
        features: of shape (n, number of features).
    """

    formula: dict[str, Array]
    upper: dict[str, Array]
    unshared: Array
    loss_block: Array
    outside: Array
    capacity: Array
    has_several_streams: Array
    features: Array

    @classmethod
    def of(cls, facts: Sequence[Facts]) -> Table:
        """The table of some steps, in order."""

        def column(name: str) -> Array:
            return np.array([getattr(one, name) for one in facts], dtype=np.float64)

        def levels(name: str) -> dict[str, Array]:
            found = [getattr(one, name) for one in facts]
            return {
                level: np.array([getattr(one, level) for one in found], dtype=np.float64)
                for level in LEVELS
            }

        return cls(
            formula=levels("formula"),
            upper=levels("upper"),
            unshared=column("unshared"),
            loss_block=column("loss_block"),
            outside=column("outside"),
            capacity=column("capacity"),
            has_several_streams=column("has_several_streams"),
            features=np.array([one.features for one in facts], dtype=np.float64).reshape(
                len(facts), len(FEATURES)
            ),
        )

    def take(self, rows: npt.NDArray[np.bool_]) -> Table:
        """The rows of a mask of shape (n,)."""
        return Table(
            formula={level: column[rows] for level, column in self.formula.items()},
            upper={level: column[rows] for level, column in self.upper.items()},
            unshared=self.unshared[rows],
            loss_block=self.loss_block[rows],
            outside=self.outside[rows],
            capacity=self.capacity[rows],
            has_several_streams=self.has_several_streams[rows],
            features=self.features[rows],
        )

    def column(self, name: str) -> Array:
        """One feature, of shape (n,)."""
        column: Array = self.features[:, NAMES.index(name)]
        return column


def facts_of(step: Step, estimate: Estimate) -> Facts:
    """The facts of a step that the formula has estimated."""
    ledger = estimate.ledger
    peak = estimate.peak_bytes.allocated
    several_streams = step.method.is_fsdp or step.method.is_zero
    unshared = _unshared_bytes(ledger, peak)
    loss = ledger.get(Instant.LOSS_BACKWARD, {})
    loss_block = loss.get(Term.LOSS_TEMPORARIES, 0) // LOSS_BLOCKS
    outside = outside_bytes(step.gpu, step.layout)
    known = _spec(step) | _gpu(step)
    column = ledger[estimate.peak_instant]
    for name, terms in _SHARES.items():
        known[name] = sum(column.get(term, 0) for term in terms) / peak
    known["has_several_streams"] = float(several_streams)
    known["unshared_share"] = unshared / peak
    known["loss_block_share"] = loss_block / peak
    known["outside_share"] = outside / peak
    known["fill"] = peak / step.gpu.usable_bytes
    return Facts(
        formula=estimate.peak_bytes,
        upper=estimate.upper_bytes,
        unshared=unshared,
        loss_block=loss_block,
        outside=outside,
        capacity=step.gpu.usable_bytes,
        has_several_streams=several_streams,
        features=tuple(float(known[name]) for name in NAMES),
    )


def _unshared_bytes(ledger: Ledger, peak: int) -> int:
    largest: dict[Any, int] = {}
    for column in ledger.values():
        for term, size in column.items():
            largest[term] = max(largest.get(term, 0), size)
    return sum(largest.values()) - peak


def _spec(step: Step) -> dict[str, float]:
    job, layout = step.job, step.layout
    return _model(job.model, job.finetune) | {
        "log2_tokens": log2(step.micro_batch * job.seq_len),
        "log2_seq_len": log2(job.seq_len),
        "is_adapted": float(job.finetune.is_lora),
        "is_quantized": float(job.finetune.is_quantized),
        "compute_bytes": float(job.precision.compute_bytes),
        "is_autocast": float(job.precision.is_mixed),
        "is_checkpointed": float(job.checkpointing is not Checkpointing.NONE),
        "optimizer_states": float(job.optimizer.states_per_parameter),
        "log2_dp": log2(layout.dp),
        "log2_tp": log2(layout.tp),
        "log2_shard": log2(layout.shard),
    }


@lru_cache(maxsize=256)
def _model(model: Model, finetune: Finetune) -> dict[str, float]:
    decoder = describe(model)
    return {
        "log2_parameters": log2(decoder.num_parameters),
        "log2_hidden": log2(decoder.hidden_size),
        "log2_vocab": log2(decoder.vocab_size),
        "log2_blocks": log2(decoder.num_layers),
        "has_experts": float(decoder.has_experts),
        "trained_share": count_model(decoder, finetune=finetune).all.trained
        / decoder.num_parameters,
    }


def _gpu(step: Step) -> dict[str, float]:
    major, minor = step.gpu.compute_capability
    return {
        "log2_capacity": log2(step.gpu.usable_bytes),
        "log2_sm_count": log2(step.gpu.sm_count),
        "compute_capability": major + minor / 10,
    }
