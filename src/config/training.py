"""From the composed configuration of `src.train` to frozen options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from src.config import zoo
from src.config.calibration import CHAMPION
from src.config.request import container
from src.config.train_keys import TRAIN
from src.errors import UserError
from src.record import Source
from src.residual.correctors import Kind
from src.residual.options import Options
from src.residual.selection import Selection
from src.residual.trees import TreeOptions
from src.spec import parse_choice


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """What `src.train` is asked.

    Attributes:
        options: how corrections are fitted and judged.
        selection: which rows count.
        files: files of rows; empty: MLflow's.
        check: compare fresh rows with the champion, and fit nothing.
        rollback: go back to the champion before.
        folder: where the champion lies.
        tracking_uri: MLflow's; None: the environment's or the project's.
    """

    options: Options
    selection: Selection
    files: tuple[Path, ...]
    check: bool
    rollback: bool
    folder: Path
    tracking_uri: str | None

    @property
    def uses_mlflow(self) -> bool:
        """Whether rows come from MLflow, or the champion is registered there."""
        return not self.files or self.tracking_uri is not None


def to_training(cfg: DictConfig) -> TrainingRequest:
    """The options.

    Raises:
        UserError: a value is not allowed.
    """
    keys = container(cfg)
    if keys["check"] and keys["rollback"]:
        raise UserError(key="rollback", value="true", allowed="without check=true")
    folder = CHAMPION if keys["out"] is None else Path(keys["out"]).expanduser().absolute()
    if folder.is_file() or not folder.parent.is_dir():
        raise UserError(key="out", value=keys["out"], allowed="a folder in one that exists")
    return TrainingRequest(
        options=_options(keys["residual"]),
        selection=_selection(keys),
        files=_files(keys["rows"]),
        check=keys["check"],
        rollback=keys["rollback"],
        folder=folder,
        tracking_uri=keys["tracking"]["uri"],
    )


def _options(raw: Mapping[str, Any]) -> Options:
    kinds = [parse_choice(Kind, str(name), key="residual.kinds") for name in raw["kinds"]]
    if not kinds:
        allowed = TRAIN.allowed_for("residual.kinds")
        raise UserError(key="residual.kinds", value="[]", allowed=allowed)
    return Options(
        coverage=raw["coverage"],
        min_rows=raw["min_rows"],
        min_families=raw["min_families"],
        kinds=tuple(kinds),
        ridge_penalty=raw["ridge_penalty"],
        trees=TreeOptions(**raw["trees"]),
    )


def _selection(keys: Mapping[str, Any]) -> Selection:
    sources = [parse_choice(Source, str(name), key="sources") for name in keys["sources"]]
    if not sources or Source.SIMULATED in sources:
        allowed = f"{TRAIN.allowed_for('sources')}; simulated rows are never a target"
        raise UserError(key="sources", value=keys["sources"], allowed=allowed)
    gpus = []
    for name in keys["gpus"]:
        sku = zoo.find("gpu", str(name))
        if sku is None:
            raise UserError(key="gpus", value=name, allowed=TRAIN.allowed_for("gpus"))
        gpus.append(sku)
    versions: dict[str, str] = {}
    for pair in keys["versions"]:
        library, separator, version = str(pair).partition(":")
        if not (library and separator and version):
            raise UserError(key="versions", value=pair, allowed=TRAIN.allowed_for("versions"))
        versions[library] = version
    return Selection(sources=tuple(sources), gpus=tuple(gpus), versions=versions)


def _files(names: list[Any]) -> tuple[Path, ...]:
    files = tuple(Path(str(name)).expanduser() for name in names)
    for file in files:
        if not file.is_file():
            raise UserError(key="rows", value=file, allowed="files that exist, or [] for MLflow's")
    return files
