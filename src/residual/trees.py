"""LightGBM as a correction; it is imported where trees are fitted or answer, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from src.errors import UserError
from src.residual.correctors import Allocator, Kind
from src.residual.facts import FEATURES, NAMES, Array, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeOptions:
    """How trees are grown; the defaults are strong regularisation for some hundred rows.

    Attributes:
        rounds: trees, one after the other.
        learning_rate: how much of its fit each tree adds.
        leaves: of a tree, at most.
        min_rows_per_leaf: rows that a leaf has to rest on.
        l2: penalty on leaves' values, in rows.
        seed: of the (deterministic) fit.
    """

    rounds: int = 200
    learning_rate: float = 0.05
    leaves: int = 6
    min_rows_per_leaf: int = 8
    l2: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("rounds", "min_rows_per_leaf"):
            if getattr(self, key) < 1:
                allowed = "a whole number, 1 or more"
                raise UserError(
                    key=f"residual.trees.{key}", value=getattr(self, key), allowed=allowed
                )
        if self.leaves < 2:
            raise UserError(key="residual.trees.leaves", value=self.leaves, allowed="2 or more")
        if not 0 < self.learning_rate <= 1:
            allowed = "above 0, at most 1"
            raise UserError(
                key="residual.trees.learning_rate", value=self.learning_rate, allowed=allowed
            )
        if not self.l2 >= 0:
            raise UserError(key="residual.trees.l2", value=self.l2, allowed="0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """A boosted ensemble on top of the formula, or of an allocator model.

    Attributes:
        booster: LightGBM's.
        base: what it corrects; None for the formula.
    """

    booster: Any
    base: Allocator | None

    @property
    def kind(self) -> Kind:
        """`trees` or `allocator+trees`."""
        return Kind.TREES if self.base is None else Kind.ALLOCATOR_TREES

    def log_ratio(self, table: Table, allocated: Array, /) -> Array:
        """What the base says, and the trees' correction of it."""
        rest = np.asarray(
            self.booster.predict(table.features, num_threads=1, validate_features=False),
            dtype=np.float64,
        )
        return rest if self.base is None else rest + self.base.log_ratio(table, allocated)

    def parameters(self) -> dict[str, Any]:
        """The base's."""
        return {} if self.base is None else self.base.parameters()

    def text(self) -> str:
        """LightGBM's text form."""
        return str(self.booster.model_to_string())


def fit_trees(
    table: Table, log_ratios: Array, *, level: str, base: Allocator | None, options: TreeOptions
) -> Trees:
    """Trees on what the base leaves of log(measured / formula); the same for the same rows.

    Args:
        table: the facts of n steps.
        log_ratios: log(measured / base), of shape (n,).
        level: of what was measured; monotone constraints are the allocator's, so none hold for
            `allocated`.
        base: what they correct.
        options: how they are grown.
    """
    import lightgbm

    is_monotone = level != "allocated"
    data = lightgbm.Dataset(
        table.features,
        label=log_ratios,
        feature_name=list(NAMES),
        params={"feature_pre_filter": False, "verbosity": -1, "num_threads": 1},
    )
    parameters = {
        "objective": "regression",
        "learning_rate": options.learning_rate,
        "num_leaves": options.leaves,
        "min_data_in_leaf": options.min_rows_per_leaf,
        "lambda_l2": options.l2,
        "monotone_constraints": [one.rises if is_monotone else 0 for one in FEATURES],
        "seed": options.seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    booster = lightgbm.train(parameters, data, num_boost_round=options.rounds)
    return Trees(booster, base)


def read_trees(text: str, base: Allocator | None) -> Trees:
    """The trees of LightGBM's text form.

    Raises:
        ValueError: it is no such text, or its features are not `FEATURES` in their order.
    """
    import lightgbm

    try:
        booster = lightgbm.Booster(model_str=text)
    except lightgbm.basic.LightGBMError as error:
        raise ValueError(f"LightGBM cannot read it ({error})") from error
    if tuple(booster.feature_name()) != NAMES:
        raise ValueError("its features are others, or in another order")
    return Trees(booster, base)
