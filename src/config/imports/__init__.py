"""`from=FILE`: configurations of other programs, as our keys below what is typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from src.config.imports.imported import MAX_FILES, Imported
from src.config.imports.reading import told
from src.errors import UserError

__all__ = ["Imported", "import_files"]


def import_files(written: Any, typed: Mapping[str, Any]) -> Imported:
    """What one file or a list of them says.

    Args:
        written: the value of `from`; None: no file.
        typed: our keys that were typed, and their values.

    Raises:
        UserError: a file cannot be read, recognised, or represented.
    """
    if written is None:
        return Imported()
    files = list(written) if isinstance(written, list | tuple) else [written]
    if not files or not all(isinstance(file, str | PurePath) and str(file) for file in files):
        raise UserError(key="from", value=told(written), allowed="FILE | [FILE,FILE]")
    if len(files) > MAX_FILES:
        raise UserError(key="from", value=f"{len(files)} files", allowed=f"{MAX_FILES} at most")
    # The tables are not loaded by a question without files.
    from src.config.imports.collect import Collected
    from src.config.imports.settle import settle

    collected = Collected(typed=typed.keys())
    for file in files:
        collected.read(str(file))
    facts = settle(collected, typed)
    return Imported(facts=facts, warnings=tuple(collected.warnings))
