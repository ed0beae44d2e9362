"""Configurations written to files, and what `from=` takes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from src.config.imports import import_files


def told(folder: Path, name: str, content: Any, **typed: Any) -> dict[str, Any]:
    return import_files(write(folder, name, content), typed).values


def write(folder: Path, name: str, content: Any) -> str:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)
