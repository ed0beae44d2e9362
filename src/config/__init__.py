"""From what a user types to frozen specs: Hydra and OmegaConf stop here."""

from __future__ import annotations

from src.config.answering import Answer, answering
from src.config.command import (
    EXIT_DRIFT,
    EXIT_NOTHING_FITS,
    EXIT_OK,
    emit,
    emit_all,
    run_command,
    warn,
)
from src.config.compose import (
    compose_arguments,
    compose_keywords,
    compose_keywords_with_files,
    compose_with_files,
)
from src.config.flags import run_flag
from src.config.listing import listing_rows
from src.config.request import Output, Question, to_output, to_request

__all__ = [
    "Answer",
    "EXIT_DRIFT",
    "EXIT_NOTHING_FITS",
    "EXIT_OK",
    "Output",
    "Question",
    "answering",
    "compose_arguments",
    "compose_keywords",
    "compose_keywords_with_files",
    "compose_with_files",
    "emit",
    "emit_all",
    "listing_rows",
    "run_command",
    "run_flag",
    "to_output",
    "to_request",
    "warn",
]
