"""A champion's folder as commands use it: read, kept, and exchanged with the one before."""

from __future__ import annotations

import sys
from pathlib import Path

from src.config.calibration import CHAMPION
from src.errors import UserError
from src.residual.champion import Champion
from src.residual.files import ChampionError, promote, read_champion, roll_back

CARD = "README.md"


def find_champion(folder: Path) -> Champion | None:
    """The champion of a folder; a damaged or foreign one is told on stderr and counts as none."""
    if not folder.exists():
        return None
    try:
        return read_champion(folder)
    except ChampionError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def need_champion(folder: Path) -> Champion:
    """The champion of a folder.

    Raises:
        UserError: there is none to use.
    """
    try:
        return read_champion(folder)
    except ChampionError as error:
        raise UserError(key="check", value="true", allowed=str(error)) from error


def keep(champion: Champion, folder: Path, card: str) -> None:
    """Make a champion of the folder's, with its card: beside the project's folder, else in it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        promote(champion, folder)
        (folder.parent if folder == CHAMPION else folder).joinpath(CARD).write_text(card, "utf-8")
    except OSError as error:
        allowed = f"cannot be written ({error.strerror})"
        raise UserError(key="out", value=folder, allowed=allowed) from error


def go_back(folder: Path) -> Champion:
    """Exchange the champion with the one before.

    Raises:
        UserError: there is none before, or the folders cannot be renamed.
    """
    try:
        return roll_back(folder)
    except ChampionError as error:
        raise UserError(key="rollback", value="true", allowed=str(error)) from error
    except OSError as error:
        allowed = f"cannot be renamed ({error.strerror})"
        raise UserError(key="rollback", value="true", allowed=allowed) from error
