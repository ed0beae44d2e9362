"""A champion's folder: `meta.json`, and a LightGBM text for each level that has trees. No pickle.

The folder is replaced as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from src.record import LEVELS
from src.residual.champion import NAME, Champion, LevelModel, Origin
from src.residual.correctors import Allocator, Constant, Corrector, Kind, Ridge
from src.residual.facts import FEATURES, NAMES
from src.residual.hull import Hull
from src.residual.trees import Trees, read_trees

FORMAT = 1
META = "meta.json"
MOST_PACE = 1e9
"""Rows that a pace may rest on; its factors are far smaller."""


class ChampionError(Exception):
    """A folder holds no champion that can be used; the text says why, in one line."""


def write_champion(champion: Champion, folder: Path) -> None:
    """Put a champion in place of what the folder holds.

    Raises:
        OSError: it cannot be written; the folder is as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in champion_files(champion).items():
            _write(fresh / name, text)
        fresh.chmod(0o755)
        replace_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Let `fresh` be what `folder` was; both lie in the same folder."""
    if not folder.exists():
        fresh.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "old"
    try:
        folder.rename(old)
        try:
            fresh.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def previous_of(folder: Path) -> Path:
    """Where the champion before lies."""
    return folder.with_name(f"{folder.name}-previous")


def promote(champion: Champion, folder: Path) -> None:
    """Write a champion, and keep what the folder held as the one before.

    Raises:
        OSError: it cannot be written.
    """
    if folder.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "copy"
        try:
            shutil.copytree(folder, fresh)
            replace_folder(fresh, previous_of(folder))
        finally:
            shutil.rmtree(fresh.parent, ignore_errors=True)
    write_champion(champion, folder)


def roll_back(folder: Path) -> Champion:
    """Let the champion before be the champion, and the champion the one before.

    Raises:
        ChampionError: there is none before, or it cannot be used; nothing has changed then.
        OSError: the folders cannot be renamed.
    """
    previous = previous_of(folder)
    champion = read_champion(previous)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "aside"
    try:
        previous.rename(aside)
        if folder.exists():
            folder.rename(previous)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside.parent, ignore_errors=True)
    return champion


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def champion_files(champion: Champion) -> dict[str, str]:
    """File name -> content."""
    files: dict[str, str] = {}
    levels: dict[str, Any] = {}
    for level, model in champion.levels.items():
        corrector = model.corrector
        levels[level] = {
            "kind": corrector.kind.value,
            "parameters": corrector.parameters(),
            "bound": {"log_margin": model.log_margin, "rows": model.bound_rows},
            "trees": None,
        }
        if isinstance(corrector, Trees):
            name, text = f"{level}.lightgbm.txt", corrector.text()
            files[name] = text
            levels[level]["trees"] = {"file": name, "sha256": _sha256(text)}
    meta = {
        "format": FORMAT,
        "name": NAME,
        "features": [asdict(feature) for feature in FEATURES],
        "origin": asdict(champion.origin),
        "levels": levels,
        "hull": champion.hull.to_json(),
        "metrics": champion.metrics,
        "pace": champion.pace,
    }
    files[META] = json.dumps(meta, indent=1, sort_keys=True, allow_nan=False) + "\n"
    return files


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_champion(folder: Path) -> Champion:
    """The champion of a folder.

    Raises:
        ChampionError: there is none, it is damaged, or it is not of this program's features.
    """
    path = folder / META
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ChampionError(f"there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ChampionError(f"{path} cannot be read ({error})") from error
    try:
        return _champion(raw, folder)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise ChampionError(f"{path} is damaged or foreign ({_words(error)})") from error


def _words(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _champion(raw: Any, folder: Path) -> Champion:
    if raw["format"] != FORMAT or raw["name"] != NAME:
        raise ValueError(f"format {raw['format']} of {raw['name']}, not {FORMAT} of {NAME}")
    if raw["features"] != [asdict(feature) for feature in FEATURES]:
        raise ValueError("its features are others, or in another order")
    origin = dict(raw["origin"])
    for key in ("row_ids", "urls"):
        origin[key] = tuple(origin[key])
    return Champion(
        levels={level: _level(level, raw["levels"][level], folder) for level in LEVELS},
        hull=Hull.from_json(raw["hull"]),
        origin=Origin(**origin),
        metrics=raw["metrics"],
        pace=_pace(raw.get("pace", {})),
    )


def _pace(raw: Mapping[str, Any]) -> dict[str, float]:
    """How fast steps were; files from before it was kept have none."""
    found = {str(name): float(value) for name, value in raw.items()}
    if not all(0 < value < MOST_PACE for value in found.values()):
        raise ValueError(f"pace: {found} are no factors")
    return found


def _level(level: str, raw: Mapping[str, Any], folder: Path) -> LevelModel:
    bound = raw["bound"]
    margin = bound["log_margin"]
    if margin is not None and not 0 <= float(margin) < 10:
        raise ValueError(f"levels.{level}.bound.log_margin: {margin!r} is no margin")
    return LevelModel(
        corrector=_corrector(level, raw, folder),
        log_margin=None if margin is None else float(margin),
        bound_rows=int(bound["rows"]),
    )


def _corrector(level: str, raw: Mapping[str, Any], folder: Path) -> Corrector:
    kind, parameters = Kind(raw["kind"]), dict(raw["parameters"])
    match kind:
        case Kind.FORMULA | Kind.CONSTANT:
            return Constant(log=float(parameters["log"]))
        case Kind.RIDGE:
            weights = tuple(float(weight) for weight in parameters["weights"])
            if len(weights) != len(NAMES):
                raise ValueError(f"{len(weights)} weights for {len(NAMES)} features")
            return Ridge(weights=weights, intercept=float(parameters["intercept"]))
        case Kind.ALLOCATOR:
            return _allocator(level, parameters)
    base = _allocator(level, parameters) if kind is Kind.ALLOCATOR_TREES else None
    name = str(raw["trees"]["file"])
    if name != Path(name).name:
        raise ValueError(f"{name} lies outside the folder")
    text = (folder / name).read_text("utf-8")
    if _sha256(text) != raw["trees"]["sha256"]:
        raise ValueError(f"{name} is not the file that belongs to it")
    return read_trees(text, base)


def _allocator(level: str, parameters: Mapping[str, Any]) -> Allocator:
    return Allocator(level=level, **{name: float(value) for name, value in parameters.items()})
