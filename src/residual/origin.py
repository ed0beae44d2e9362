"""What a champion was learned from, counted."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime

from src.residual.champion import Origin
from src.residual.dataset import Dataset
from src.residual.options import Options

_FITTED_BY = ("lightgbm", "numpy", "scipy", "scikit-learn")


def origin_of(dataset: Dataset, options: Options) -> Origin:
    """The origin of what is trained on a dataset now."""
    samples = dataset.samples
    versions: dict[str, set[str]] = {}
    for sample in samples:
        for name, version in sample.versions.items():
            versions.setdefault(name, set()).add(version)
    plain = asdict(options)
    plain["kinds"] = [kind.value for kind in options.kinds]
    return Origin(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        row_ids=tuple(sample.row_id for sample in samples),
        rows_hash=dataset.rows_hash,
        sources=_counts(sample.source.value for sample in samples),
        families=_counts(dataset.labels("family")),
        methods=_counts(dataset.labels("method")),
        gpus=_counts(dataset.labels("gpu")),
        urls=tuple(sorted({sample.url for sample in samples if sample.url})),
        versions={name: importlib.metadata.version(name) for name in _FITTED_BY},
        row_versions={name: tuple(sorted(found)) for name, found in sorted(versions.items())},
        options=plain,
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    counted = Counter(names)
    return {name: counted[name] for name in sorted(counted)}
