"""Which kind of file it is, by its keys alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from src.config.imports.accelerate import ACCELERATE
from src.config.imports.axolotl import AXOLOTL
from src.config.imports.deepspeed import DEEPSPEED
from src.config.imports.llamafactory import LLAMA_FACTORY
from src.config.imports.reading import file_error, told
from src.config.imports.rules import Format
from src.config.imports.trainer import TRAINING_ARGUMENTS
from src.config.imports.trl import TRL

FORMATS = (TRAINING_ARGUMENTS, ACCELERATE, DEEPSPEED, TRL, AXOLOTL, LLAMA_FACTORY)
_SHOWN = 3


def detect(file: str, content: Mapping[str, Any]) -> Format:
    """The format with whose own keys the file is written.

    Keys of TrainingArguments are also keys of TRL and LLaMA-Factory, so they decide last.

    Raises:
        UserError: it is none, or could be several.
    """
    own = {form: _own_marks(form, content) for form in FORMATS if form is not TRAINING_ARGUMENTS}
    found = {form: keys for form, keys in own.items() if keys}
    if len(found) > 1:
        best, second = sorted(found, key=lambda form: len(found[form]), reverse=True)[:2]
        if len(found[best]) > 2 * len(found[second]):
            return best
        seen = "; ".join(f"{form.name}: {_some(keys)}" for form, keys in found.items())
        raise file_error(file, f"keys of more than one kind of file ({seen})")
    if found:
        return next(iter(found))
    if TRAINING_ARGUMENTS.marks & set(content):
        return TRAINING_ARGUMENTS
    seen = f"its keys are {_some(list(content))}" if content else "it has no keys"
    known = ", ".join(form.name for form in FORMATS)
    raise file_error(file, f"none of the kinds that are recognised: {known}; {seen}")


def _own_marks(form: Format, content: Mapping[str, Any]) -> list[str]:
    """Marks that no other format has; a key that is null says nothing."""
    given = [key for key, value in content.items() if value is not None]
    return [key for key in given if key in form.marks]


def _some(keys: list[str]) -> str:
    more = ", ..." if len(keys) > _SHOWN else ""
    return ", ".join(told(key) for key in keys[:_SHOWN]) + more
