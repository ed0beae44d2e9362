"""From keys to a composed configuration, through Hydra; every error becomes a UserError."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import lru_cache
from numbers import Integral
from pathlib import PurePath
from typing import Any

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.config.arguments import as_override, split_arguments
from src.config.keys import KEYS, ValueKind, check_key, help_text
from src.config.schema import EstimateConfig
from src.config.zoo import CONF
from src.errors import UserError
from src.spec import FinetuneKind, parse_choice

_DATA_FOLDERS = ("model", "gpu")
"""Folders of conf whose files are data: `model` and `gpu` are plain values, no config groups."""


class ConfFolder(FileConfigSource):
    """The folder conf, in which the data folders are no config groups."""

    @staticmethod
    def scheme() -> str:
        """The scheme of the search path's entry."""
        return "peakcast"

    def is_group(self, config_path: str) -> bool:
        """Whether the folder holds the options of a config group."""
        return config_path not in _DATA_FOLDERS and super().is_group(config_path)


class ConfFolderSearchPath(SearchPathPlugin):
    """Makes Hydra read this project's conf as a ConfFolder; other programs' paths stay."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the scheme of the entry that is this project's conf."""
        for element in search_path.get_path():
            if element.path == str(CONF):
                element.path = f"{ConfFolder.scheme()}://{CONF}"


def _register() -> None:
    Plugins.instance().register(ConfFolder)
    Plugins.instance().register(ConfFolderSearchPath)
    ConfigStore.instance().store(name="estimate_schema", node=EstimateConfig)


def compose_arguments(arguments: Sequence[str]) -> DictConfig:
    """The configuration that `key=value` arguments ask for.

    Raises:
        UserError: a key, a type or the grammar is wrong.
    """
    typed = split_arguments(arguments)
    if "finetune" in typed:
        parse_choice(FinetuneKind, typed["finetune"], key="finetune")
    with _errors_for_people(typed):
        return _compose([as_override(key, value) for key, value in typed.items()])


def compose_keywords(keywords: Mapping[str, Any]) -> DictConfig:
    """The configuration that keyword arguments ask for; groups may be dicts.

    Raises:
        UserError: a key or a type is wrong.
    """
    flat = {key: _plain(value) for key, value in _flatten(keywords)}
    kind = parse_choice(FinetuneKind, str(flat.pop("finetune", "full")), key="finetune")
    for key, value in flat.items():
        check_key(key, value)
    cfg = copy.deepcopy(_defaults(kind))
    with _errors_for_people(flat):
        for key, value in flat.items():
            is_word = isinstance(value, str) and key in KEYS and KEYS[key].kind is ValueKind.WORDS
            is_arch = key == "arch" or key.startswith("arch.")
            OmegaConf.update(cfg, key, [value] if is_word else value, force_add=is_arch)
    return cfg


def show_with_hydra(flag: str, arguments: Sequence[str]) -> None:
    """Print the help, or the composed configuration, by Hydra's own command line.

    Args:
        flag: `--help` or `--cfg`.
        arguments: `key=value` arguments; the help takes none.

    Raises:
        UserError: a key, a type or the grammar is wrong.
    """
    _register()
    template = help_text(_default_texts()).replace("$", "$$")
    node = {"app_name": "peakcast", "header": "", "footer": "", "template": template}
    ConfigStore.instance().store(group="hydra/help", name="estimate", node=node)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # its errors are raised then, not printed
    typed = split_arguments(arguments)
    overrides = [as_override(key, value) for key, value in typed.items()]
    more = ["--help", "hydra/help=estimate"] if flag == "--help" else ["--cfg", "job", *overrides]
    sys.argv = [sys.argv[0], *more]
    decorate = hydra.main(version_base="1.3", config_path=str(CONF), config_name="estimate")
    run: Callable[[], None] = decorate(lambda _: None)
    with _errors_for_people(typed), suppress(SystemExit):  # --help ends with one
        run()


def _default_texts() -> dict[str, str]:
    """The default of each key as a user would type it; LoRA's own for its options."""
    values = {key: OmegaConf.select(_defaults(FinetuneKind.LORA), key) for key in KEYS}
    shown = {key: value for key, value in values.items() if not OmegaConf.is_dict(value)}
    texts = {key: "null" if value is None else str(value) for key, value in shown.items()}
    del texts["model"]
    return {**texts, "finetune": "full", "method": "all", "trust_remote_code": "false"}


def _compose(overrides: list[str]) -> DictConfig:
    _register()
    with hydra.initialize_config_dir(str(CONF), job_name="estimate", version_base="1.3"):
        return hydra.compose("estimate", overrides=overrides)


@lru_cache(maxsize=len(FinetuneKind))
def _defaults(kind: FinetuneKind) -> DictConfig:
    return _compose([f"finetune={kind}"])


def _flatten(keywords: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`zero={"a": 1}` as `zero.a`; the kind of `finetune` first; `arch` stays as it is."""
    for key, value in keywords.items():
        if key == "arch" or not isinstance(value, Mapping):
            yield key, value
            continue
        for inner, inner_value in value.items():
            is_kind = key == "finetune" and inner == "kind"
            yield (key if is_kind else f"{key}.{inner}"), inner_value


def _plain(value: Any) -> Any:
    """The value as OmegaConf takes it: enums, paths and tuples as text and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


@contextmanager
def _errors_for_people(typed: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into one line: key, value and what is allowed."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _translated(error, typed) from error


def _translated(error: Exception, typed: Mapping[str, Any]) -> UserError:
    key = _key_of(error, typed)
    if key is None:
        text = str(error) or str(error.__cause__)
        return UserError(key="arguments", value=" ".join(typed), allowed=text.splitlines()[0])
    value = typed.get(key, "")
    allowed = KEYS[key].allowed if key in KEYS else "a value of the config field"
    is_number = key in KEYS and KEYS[key].kind is ValueKind.LITERAL and key != "arch"
    if isinstance(error, OverrideParseException) and not is_number:
        allowed += f"; cannot be read as it stands, quote what is text: \"{key}='...'\""
    return UserError(key=key, value=value, allowed=allowed)


def _key_of(error: Exception, typed: Mapping[str, Any]) -> str | None:
    """The key that an error speaks of."""
    known = sorted(typed, key=len, reverse=True)
    if isinstance(error, OverrideParseException):
        return next(
            (key for key in known if error.override.lstrip("+").startswith(f"{key}=")), None
        )
    cause: BaseException | None = error
    while cause is not None:
        full = getattr(cause, "full_key", None)
        if full:
            return next((key for key in known if _is_part(full, key)), str(full))
        cause = cause.__cause__
    return next((key for key in known if f"{key}={typed[key]}" in str(error)), None)


def _is_part(full_key: str, key: str) -> bool:
    """Whether `full_key` (`method[1]`) is `key` or an element of it."""
    return full_key == key or full_key.startswith((f"{key}[", f"{key}."))
