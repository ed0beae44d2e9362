"""The mean over micro batches of sequences that are not all of one length."""

from __future__ import annotations

from dataclasses import fields, replace

from src.plan.search import Estimator
from src.spec import Lengths, Step
from src.units import Levels


def expected_bytes(step: Step, lengths: Lengths, estimator: Estimator) -> Levels:
    """Mean estimate of a step whose micro batch is padded to its longest sequence, per level."""
    sums = dict.fromkeys((item.name for item in fields(Levels)), 0.0)
    for length, probability in lengths.padded(step.micro_batch):
        shorter = replace(step, job=replace(step.job, seq_len=length))
        peak = estimator(shorter).peak_bytes
        for name in sums:
            sums[name] += probability * getattr(peak, name)
    return Levels(**{name: round(value) for name, value in sums.items()})


def without_padding(step: Step, lengths: Lengths) -> tuple[Step, float]:
    """The step at its mean padded length, and the share of its tokens that are not padding."""
    padded = lengths.mean_padded(step.micro_batch)
    mean = replace(step, job=replace(step.job, seq_len=max(1, round(padded))))
    return mean, lengths.mean / padded
