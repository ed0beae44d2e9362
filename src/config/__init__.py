"""From what a user types to frozen specs: Hydra and OmegaConf stop here."""

from __future__ import annotations

from src.config.command import EXIT_NOTHING_FITS, EXIT_OK, run_command
from src.config.compose import compose_arguments, compose_keywords, show_with_hydra
from src.config.listing import listing_rows
from src.config.request import Output, Question, to_output, to_request

__all__ = [
    "EXIT_NOTHING_FITS",
    "EXIT_OK",
    "Output",
    "Question",
    "compose_arguments",
    "compose_keywords",
    "listing_rows",
    "run_command",
    "show_with_hydra",
    "to_output",
    "to_request",
]
