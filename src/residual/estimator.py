"""The formula, corrected: an estimator like any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from src.memory import Estimate, estimate_step
from src.residual.champion import Champion
from src.residual.facts import facts_of
from src.residual.hull import Place
from src.spec import Step

MOST_NAMED = 3


class Calibrated:
    """Answers for a step by the formula and a champion; the ledger stays the formula's.

    Args:
        champion: the correction.
    """

    def __init__(self, champion: Champion) -> None:
        self.champion = champion

    def __call__(self, step: Step) -> Estimate:
        """The corrected estimate.

        Raises:
            UserError: the formula refuses the step.
        """
        estimate = estimate_step(step)
        corrected = self.champion.correct(facts_of(step, estimate))
        return replace(
            estimate,
            peak_bytes=corrected.peak_bytes,
            upper_bytes=corrected.upper_bytes,
            notes=(*estimate.notes, *_notes(corrected.place)),
        )

    @property
    def pace(self) -> Mapping[str, float]:
        """How fast measured steps were, as plain values; empty where none was timed."""
        return self.champion.pace

    def place(self, step: Step) -> Place:
        """Where a step lies with respect to the rows.

        Raises:
            UserError: the formula refuses the step.
        """
        return self.champion.correct(facts_of(step, estimate_step(step))).place

    def in_range(self, steps: Iterable[Step]) -> bool:
        """Whether the whole correction holds for all of them."""
        return all(self.place(step).in_range for step in steps)


def _notes(place: Place) -> tuple[str, ...]:
    if place.in_range:
        return ()
    names = ", ".join(place.outside[:MOST_NAMED])
    return (
        f"outside what was calibrated on ({names}): {place.weight:.0%} of the correction, "
        "wider bound",
    )
