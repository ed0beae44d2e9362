"""The few options with dashes: help, the composed configuration, the version."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from src.config.compose import compose_arguments, print_help
from src.config.keys import ESTIMATE
from src.config.program import Program
from src.errors import UserError

_CFG = ("--cfg", "-c")


def run_flag(arguments: Sequence[str], program: Program = ESTIMATE) -> bool:
    """Print what a known flag asks for; whether there was one.

    Raises:
        UserError: `--cfg` asks for something other than `job`.
    """
    if "--help" in arguments or "-h" in arguments:
        print_help(program)
        return True
    if "--version" in arguments:
        print(f"peakcast {_version()}")
        return True
    flag = next((argument for argument in arguments if argument in _CFG), None)
    if flag is None:
        return False
    place = list(arguments).index(flag)
    asked = arguments[place + 1] if place + 1 < len(arguments) else ""
    if asked != "job":
        raise UserError(key="option", value=f"{flag} {asked}", allowed="only --cfg job")
    cfg = compose_arguments([*arguments[:place], *arguments[place + 2 :]], program)
    print(OmegaConf.to_yaml(cfg), end="")
    return True


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("peakcast")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"
