"""One step that was run, as a row: its JSON form, and the file that keeps rows whole."""

from __future__ import annotations

from src.record.file import Damaged, RowFile, Rows, add_rows, open_rows, read_rows
from src.record.row import (
    LENGTHS,
    LEVELS,
    SCHEMA_VERSION,
    VARYING,
    Outcome,
    Provenance,
    Rank,
    Row,
    Source,
    canonical,
    case_id_of,
)

__all__ = [
    "LENGTHS",
    "LEVELS",
    "SCHEMA_VERSION",
    "VARYING",
    "Damaged",
    "Outcome",
    "Provenance",
    "Rank",
    "Row",
    "RowFile",
    "Rows",
    "Source",
    "add_rows",
    "canonical",
    "case_id_of",
    "open_rows",
    "read_rows",
]
