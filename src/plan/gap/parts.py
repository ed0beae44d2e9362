"""Terms of the ledger and what measurements tell, brought to parts that both sides know."""

from __future__ import annotations

from collections.abc import Mapping

from src.measure.events import Owner
from src.memory import Term
from src.plan.gap.result import PartGap
from src.spec import Method
from src.units import MIB

PARTS: dict[str, tuple[str, ...]] = {
    "weights": (Term.WEIGHTS, Term.MASTER_WEIGHTS, Owner.WEIGHTS),
    "cast weights": (Term.CAST_WEIGHTS, Owner.CAST_WEIGHTS),
    "gathered weights, buffers": (
        Term.GATHERED_WEIGHTS,
        Term.COMMUNICATION_BUFFERS,
        Owner.GATHERED_WEIGHTS,
        Owner.COMMUNICATION_BUFFERS,
    ),
    "gradients": (Term.GRADIENTS, Term.UNSHARDED_GRADIENTS, Owner.GRADIENTS),
    "optimizer states": (Term.OPTIMIZER_STATES, Owner.OPTIMIZER_STATES),
    "saved activations": (
        Term.CHECKPOINTS,
        Term.SAVED_ACTIVATIONS,
        Term.DROPOUT_MASKS,
        Term.ATTENTION_SCORES,
        Term.ATTENTION_MASK,
        Owner.SAVED_ACTIVATIONS,
    ),
    "logits and loss": (Term.LOGITS, Term.LOSS_TEMPORARIES, Owner.LOGITS),
    "temporaries": (Term.ACTIVATION_GRADIENTS, Term.OPTIMIZER_TEMPORARIES, Owner.TEMPORARIES),
    "inputs": (Term.INPUTS, Owner.INPUTS),
    "workspaces": (Term.WORKSPACES, Owner.WORKSPACE),
}
"""Part -> the formula's terms and the dry run's owners in it."""

KEPT = "kept between steps"
WITHIN = "within the step"
_KEPT = (
    Term.WEIGHTS,
    Term.MASTER_WEIGHTS,
    Term.OPTIMIZER_STATES,
    Term.WORKSPACES,
    Owner.WORKSPACE,
)
"""Alive once a step is over and its gradients are gone; with DDP and DeepSpeed buckets too."""

_OF_NAME = {name: part for part, names in PARTS.items() for name in names}


def parts_by_owner(estimate: Mapping[str, int], measured: Mapping[str, int]) -> list[PartGap]:
    """Parts where the measurement says whose bytes it saw; a term that is in no part is its own.

    Args:
        estimate: term (or owner) -> bytes.
        measured: owner -> bytes.
    """
    terms: dict[str, dict[str, int]] = {}
    for name, size in estimate.items():
        if size:
            terms.setdefault(_OF_NAME.get(str(name), str(name)), {})[str(name)] = size
    seen: dict[str, int] = {}
    for name, size in measured.items():
        part = _OF_NAME.get(str(name), str(name))
        seen[part] = seen.get(part, 0) + size
    parts = [
        PartGap(part=part, terms=terms.get(part, {}), measured_bytes=seen.get(part, 0))
        for part in dict.fromkeys([*terms, *seen])
    ]
    return sorted(
        parts, key=lambda part: (-(abs(part.gap_bytes or 0) // MIB), -part.estimate_bytes)
    )


def parts_by_time(
    estimate: Mapping[str, int],
    *,
    method: Method,
    kept_bytes: int | None,
    peak_bytes: int | None,
) -> list[PartGap]:
    """Parts where the measurement knows its peak, and what was left after the step.

    Args:
        estimate: term (or owner) -> bytes at the peak.
        method: what was run.
        kept_bytes: measured bytes after the step; None where they were not seen.
        peak_bytes: measured bytes at the peak; None where they were not seen.
    """
    terms = {str(name): size for name, size in estimate.items() if size}
    lasting = _KEPT if method.is_fsdp else (*_KEPT, Term.COMMUNICATION_BUFFERS)
    kept = {name: size for name, size in terms.items() if name in lasting}
    within = {name: size for name, size in terms.items() if name not in kept}
    rest = None if kept_bytes is None or peak_bytes is None else peak_bytes - kept_bytes
    return [
        PartGap(part=KEPT, terms=kept, measured_bytes=kept_bytes),
        PartGap(part=WITHIN, terms=within, measured_bytes=rest),
    ]
