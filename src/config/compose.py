"""From keys to a composed configuration, through Hydra; every error becomes a UserError.

Hydra composes the defaults by its Compose API (`hydra.main` composes twice, which costs a query
0.1 s of 0.7 s), and the values asked for are laid over them one by one, so that an error is about
one key. The schema refuses values of another type.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.config.arguments import parse_value, split_arguments
from src.config.imports import Imported, import_files
from src.config.keys import ESTIMATE, FILES_KEY
from src.config.profile_schema import ProfileConfig
from src.config.program import Program, ValueKind
from src.config.schema import EstimateConfig
from src.config.train_schema import TrainConfig
from src.config.zoo import CONF
from src.errors import UserError

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
    ConfigStore.instance().store(name="profile_schema", node=ProfileConfig)
    ConfigStore.instance().store(name="train_schema", node=TrainConfig)


def compose_arguments(arguments: Sequence[str], program: Program = ESTIMATE) -> DictConfig:
    """The configuration that `key=value` arguments ask for.

    Raises:
        UserError: a key, a type or the grammar is wrong.
    """
    return compose_with_files(arguments, program)[0]


def compose_with_files(
    arguments: Sequence[str], program: Program = ESTIMATE
) -> tuple[DictConfig, Imported]:
    """The configuration, and what of it the files of `from` have said.

    Raises:
        UserError: a key, a type, the grammar or a file is wrong.
    """
    typed = split_arguments(arguments, program)
    values = {key: parse_value(key, text, program) for key, text in typed.items()}
    return _compose_over_files(program, values, typed)


def compose_keywords(keywords: Mapping[str, Any]) -> DictConfig:
    """The configuration that keyword arguments ask for; groups may be dicts.

    Raises:
        UserError: a key or a type is wrong.
    """
    return compose_keywords_with_files(keywords)[0]


def compose_keywords_with_files(keywords: Mapping[str, Any]) -> tuple[DictConfig, Imported]:
    """The configuration of keyword arguments, and what of it the files of `from` have said.

    Raises:
        UserError: a key, a type or a file is wrong.
    """
    flat = {key: _plain(value) for key, value in _flatten(keywords)}
    for key, value in flat.items():
        ESTIMATE.check_key(key, value)
    return _compose_over_files(ESTIMATE, flat, flat)


def _compose_over_files(
    program: Program, values: Mapping[str, Any], typed: Mapping[str, Any]
) -> tuple[DictConfig, Imported]:
    asked = {key: value for key, value in values.items() if key != FILES_KEY}
    imported = import_files(values.get(FILES_KEY), asked)
    said = imported.values
    with imported.naming_errors():
        cfg = _compose_values(program, {**said, **asked}, {**said, **typed})
    return cfg, imported


def print_help(program: Program = ESTIMATE) -> None:
    """Print the help by Hydra's own command line, with this program's template."""
    _register()
    template = program.help_text(_default_texts(program)).replace("$", "$$")
    node = {"app_name": "peakcast", "header": "", "footer": "", "template": template}
    ConfigStore.instance().store(group="hydra/help", name=program.name, node=node)
    sys.argv = [sys.argv[0], "--help", f"hydra/help={program.name}"]
    decorate = hydra.main(version_base="1.3", config_path=str(CONF), config_name=program.name)
    run: Callable[[], None] = decorate(lambda _: None)
    with suppress(SystemExit):
        run()


def _compose_values(
    program: Program, values: Mapping[str, Any], typed: Mapping[str, Any]
) -> DictConfig:
    """The defaults with `values` laid over; errors tell the value as it was `typed`."""
    cfg = copy.deepcopy(_defaults(program.name, program.choices(values)))
    for key, value in values.items():
        if key in program.groups:
            continue
        is_listed = program.kind_of(key) in (ValueKind.WORDS, ValueKind.FILES)
        is_word = isinstance(value, str) and is_listed
        try:
            OmegaConf.update(
                cfg,
                program.field_of(key),
                [value] if is_word else value,
                force_add=program.is_free(key),
            )
        except (OmegaConfBaseException, ValueError) as error:
            allowed = program.allowed_for(key)
            raise UserError(key=key, value=typed[key], allowed=allowed) from error
    return cfg


def _default_texts(program: Program) -> dict[str, str]:
    """The default of each key as a user would type it; an option's from a file that has it."""
    values: dict[str, Any] = {}
    chosen = [{group: option} for group, options in program.groups.items() for option in options]
    for choice in chosen:
        # An option that is left out costs Hydra's grammar nothing; one that is given, 5 ms.
        defaults = _defaults(program.name, program.choices(choice))
        for key in program.keys:
            if key == FILES_KEY:
                continue
            name = program.field_of(key)
            if values.get(key) is None and not OmegaConf.is_missing(defaults, name):
                values[key] = OmegaConf.select(defaults, name)
    shown = {key: value for key, value in values.items() if not OmegaConf.is_dict(value)}
    texts = {key: _typed(value) for key, value in shown.items()}
    return {**texts, **{group: options[0] for group, options in program.groups.items()}}


def _typed(value: object) -> str:
    """A value as a user would type it; of a list of one its word alone."""
    if value is None:
        return "null"
    if OmegaConf.is_list(value):
        words = [str(word) for word in value]  # type: ignore[attr-defined]
        return words[0] if len(words) == 1 else f"[{','.join(words)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(maxsize=16)
def _defaults(name: str, choices: tuple[str, ...]) -> DictConfig:
    _register()
    with hydra.initialize_config_dir(str(CONF), job_name=name, version_base="1.3"):
        return hydra.compose(name, overrides=list(choices))


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
