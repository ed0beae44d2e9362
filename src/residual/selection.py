"""Which rows count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from src.record import Row, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Rows by where they come from.

    Attributes:
        sources: allowed sources.
        gpus: allowed short names of GPUs; empty: all.
        versions: library -> what its version has to begin with.
    """

    sources: tuple[Source, ...] = (Source.MEASURED, Source.PUBLISHED)
    gpus: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def takes(self, row: Row) -> bool:
        """Whether a row counts."""
        gpu = row.case.get("gpu", {})
        return (
            row.source in self.sources
            and (not self.gpus or gpu.get("sku") in self.gpus)
            and all(
                row.versions.get(library, "").startswith(version)
                for library, version in self.versions.items()
            )
        )

    def of(self, rows: Iterable[Row]) -> tuple[tuple[Row, ...], int]:
        """The rows that count, and how many do not."""
        everything = tuple(rows)
        mine = tuple(row for row in everything if self.takes(row))
        return mine, len(everything) - len(mine)
