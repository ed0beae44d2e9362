"""`model=`: a name of the zoo, a config.json, or an id on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.config import zoo
from src.config.hub import HubError, read_hub_config
from src.errors import UserError, nearest
from src.spec import Model

CONFIG_FILE = "config.json"
_MAX_CONFIG_BYTES = 16 * 1024**2
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_KIND = "a name of list=models, a config.json or its folder, or owner/name on the hub"


def resolve_model(
    written: str, *, arch: Mapping[str, Any], trust_remote_code: bool
) -> tuple[Model, tuple[str, ...]]:
    """The model that `written` names with `arch` laid over its config, and the warnings.

    Raises:
        UserError: there is no such model, or its config cannot be read.
    """
    if not written.strip():
        raise UserError(key="model", value=written, allowed=f"needed: {_KIND}")
    model, warnings = _find(written, trust_remote_code)
    config, more = _unnest(model.name, model.config)
    config, override_warnings = _override(model.name, config, arch)
    resolved = Model(name=model.name, hf_id=model.hf_id, config=config)
    return resolved, (*warnings, *more, *override_warnings)


@dataclass(frozen=True, slots=True)
class _Found:
    """A config before it is checked, and what it is called."""

    name: str
    hf_id: str | None
    config: Mapping[str, Any]


def _find(written: str, trust_remote_code: bool) -> tuple[_Found, tuple[str, ...]]:
    warnings: tuple[str, ...] = ()
    name = zoo.find("model", written)
    path = Path(written).expanduser()
    looks_like_path = written.startswith((".", "~", os.sep)) or written.endswith(".json")
    is_hub = name is None and not looks_like_path and not path.exists()
    if trust_remote_code and not is_hub:
        warnings = (f"trust_remote_code has no effect: {written} is read without the hub",)
    if name is not None:
        if (path / CONFIG_FILE).is_file():
            hint = f"model={written} is the zoo's; model=./{written} reads the folder here"
            warnings = (*warnings, hint)
        entry = zoo.load("model", name)
        return _Found(name, entry["hf_id"], entry["config"]), warnings
    if not is_hub:
        return _Found(written, None, read_config(written, path)), warnings
    if _HUB_ID.fullmatch(written):
        return _Found(written, written, _read_hub(written, trust_remote_code)), warnings
    raise UserError(key="model", value=written, allowed=f"not in the zoo; {_hint(written)}")


def _hint(written: str) -> str:
    close = zoo.nearest_names("model", written)
    return f"nearest: {', '.join(close)}" if close else f"allowed: {_KIND}"


def read_config(written: str, path: Path) -> dict[str, Any]:
    """The object in a config.json, or in the config.json of a folder.

    Raises:
        UserError: no file, not JSON, or not an object; the line says which.
    """

    def error(reason: str) -> UserError:
        return UserError(key="model", value=written, allowed=f"{reason}; allowed: {_KIND}")

    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        where = f"the folder has no {CONFIG_FILE}" if path.is_dir() else "there is no such file"
        raise error(where)
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise error("larger than any config.json")
        text = file.read_text("utf-8-sig")
    except OSError as problem:
        raise error(f"cannot be read ({problem.strerror})") from problem
    except UnicodeDecodeError as problem:
        raise error("not a JSON file") from problem
    if not text.strip():
        raise error("the file is empty")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"not JSON ({problem})") from problem
    if not isinstance(config, dict):
        raise error(f"holds a JSON {type(config).__name__}, not an object")
    return config


def _read_hub(hub_id: str, trust_remote_code: bool) -> dict[str, Any]:
    """The config of a hub id; the hub's failure is told with the nearest names of the zoo."""
    try:
        return read_hub_config(hub_id, trust_remote_code=trust_remote_code)
    except HubError as error:
        allowed = f"not in the zoo, and from the hub: {error}; {_hint(hub_id)}"
        raise UserError(key="model", value=hub_id, allowed=allowed) from error


def _unnest(name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text model's own config, and warnings about what is left out."""
    warnings = []
    quantization = config.get("quantization_config")
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        warnings.append(
            f"the config of {name} is nested: only its text_config "
            f"(model_type {inner.get('model_type')}) is counted"
        )
        quantization = inner.get("quantization_config") or quantization
        config = inner
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        warnings.append(
            f"the quantization_config ({method or 'unnamed'}) of {name} is ignored: "
            "full and lora load unquantised weights"
        )
    return dict(config), tuple(warnings)


def _override(
    name: str, config: Mapping[str, Any], arch: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`arch` laid over the config, nested objects field by field; warnings for new fields."""
    warnings = []
    merged = dict(config)
    for field, value in arch.items():
        if field not in config:
            close = nearest(field, config, count=1)
            hint = f"; nearest: {close[0]}" if close else ""
            warnings.append(f"arch.{field} is no field of the config of {name}; added{hint}")
        old = merged.get(field)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = {**old, **value}
        merged[field] = value
    return merged, tuple(warnings)
