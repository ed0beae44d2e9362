"""Every key of `src.train`: what is allowed, what it means; the help text is made from this."""

from __future__ import annotations

from src.config.program import Key, Program, ValueKind
from src.record import Source
from src.residual.correctors import Kind

OPTIONS = ("default", "no-trees")

_COUNT = "a whole number, 1 or more"
_SWITCH = "true | false"


def _words(allowed: str, meaning: str) -> Key:
    return Key(allowed=allowed, meaning=meaning, kind=ValueKind.WORDS)


TRAIN = Program(
    name="train",
    question="What does the formula miss? Learns it from measured rows, and keeps it if it helps.",
    keys={
        "rows": _words("[FILES.jsonl]", "rows to learn from; []: those in MLflow"),
        "sources": _words(f"{Source.MEASURED} | {Source.PUBLISHED}", "one of them, or a list"),
        "gpus": _words("[names of src.estimate's list=gpus]", "rows of these alone; []: all"),
        "versions": _words(
            "[library:version]", "rows whose versions begin so, e.g. transformers:5.; []: all"
        ),
        "check": Key(allowed=_SWITCH, meaning="fit nothing; do fresh rows follow the champion?"),
        "rollback": Key(allowed=_SWITCH, meaning="back to the champion before"),
        "out": Key(
            allowed="FOLDER | null",
            meaning="of the champion; null: models/residual",
            kind=ValueKind.OPTIONAL_TEXT,
        ),
        "tracking.uri": Key(
            allowed="sqlite:///FILE | http://HOST:PORT | null",
            meaning="null: MLFLOW_TRACKING_URI, else mlflow.db; with rows=: no MLflow",
            kind=ValueKind.OPTIONAL_TEXT,
        ),
        "residual": Key(allowed=" | ".join(OPTIONS), meaning="what competes", kind=ValueKind.TEXT),
        "residual.coverage": Key(
            allowed="above 0 and below 1", meaning="share of rows below the upper bound"
        ),
        "residual.min_rows": Key(allowed=_COUNT, meaning="fewer: nothing is fitted"),
        "residual.min_families": Key(
            allowed="a whole number, 2 or more", meaning="model families; fewer: nothing is fitted"
        ),
        "residual.kinds": _words(
            " | ".join(kind for kind in Kind if kind is not Kind.FORMULA),
            "what competes with the formula",
        ),
        "residual.ridge_penalty": Key(allowed="above 0", meaning="in rows"),
        "residual.trees.rounds": Key(allowed=_COUNT, meaning="trees"),
        "residual.trees.learning_rate": Key(allowed="above 0, at most 1", meaning=""),
        "residual.trees.leaves": Key(allowed="2 or more", meaning="of a tree, at most"),
        "residual.trees.min_rows_per_leaf": Key(allowed=_COUNT, meaning=""),
        "residual.trees.l2": Key(allowed="0 or more", meaning="penalty on leaves, in rows"),
        "residual.trees.seed": Key(allowed="a whole number", meaning=""),
    },
    other_names={
        "mlflow_tracking_uri": "tracking.uri",
        "tracking_uri": "tracking.uri",
        "source": "sources",
        "gpu": "gpus",
        "output": "out",
        "drift": "check",
        "coverage": "residual.coverage",
        "min_rows": "residual.min_rows",
        "seed": "residual.trees.seed",
    },
    group="residual",
    options=OPTIONS,
    default_option="default",
    instead_of_sweeps="compare residual=default with residual=no-trees by out=",
    examples=(
        "",
        "rows=[profiling/published/benchmarks.jsonl]",
        "gpus=[h100-80gb] versions=[torch:2.13]",
        "check=true",
        "rollback=true",
    ),
    ending="stdout holds the table alone. Exit 0: done, 1: bad input or too few rows, 3: drift.",
)
