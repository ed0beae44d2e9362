"""What the estimators say of a case that was run."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.client import COMMAND, DryRun
from src.memory import estimate_step
from src.record import Row, Source
from src.units import Levels

_BESIDE_A_CAMPAIGN = ("nice", "-n", "10", *COMMAND)
"""The dry run leaves the processor to the step that is being measured."""


class Predictor:
    """The formula and, for rows measured here, the dry run; a context that ends it.

    Published rows ran other versions of the libraries than the dry run would.
    """

    def __init__(self) -> None:
        self._dry_run = DryRun(command=_BESIDE_A_CAMPAIGN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._dry_run.close()

    def __call__(self, row: Row) -> dict[str, Levels]:
        """Estimator -> bytes on the fullest GPU; one that does not cover the case is left out."""
        found: dict[str, Levels] = {}
        try:
            step = parse_case(row.case).step
            found["formula"] = estimate_step(step).peak_bytes
            if row.source is Source.MEASURED:
                found["dry_run"] = self._dry_run(step).peak_bytes
        except UserError:
            pass
        return found
