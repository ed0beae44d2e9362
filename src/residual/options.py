"""How a correction is trained and judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from src.errors import UserError
from src.residual.conformal import check_coverage
from src.residual.correctors import Kind
from src.residual.trees import TreeOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a correction is trained and judged.

    Attributes:
        coverage: the share of rows for which the upper bound has to hold.
        min_rows: rows below which nothing is fitted, in all and per level.
        min_families: model families below which nothing is fitted: each is left out once.
        kinds: the corrections that compete; `formula` always does.
        ridge_penalty: of the linear one, in rows.
        trees: of LightGBM.
    """

    coverage: float = 0.95
    min_rows: int = 30
    min_families: int = 3
    kinds: tuple[Kind, ...] = tuple(Kind)
    ridge_penalty: float = 10.0
    trees: TreeOptions = field(default_factory=TreeOptions)

    def __post_init__(self) -> None:
        check_coverage(self.coverage)
        for key, least in (("min_rows", 1), ("min_families", 2)):
            if getattr(self, key) < least:
                allowed = f"a whole number, {least} or more"
                raise UserError(key=f"residual.{key}", value=getattr(self, key), allowed=allowed)
        if not self.ridge_penalty > 0:
            raise UserError(
                key="residual.ridge_penalty", value=self.ridge_penalty, allowed="above 0"
            )
