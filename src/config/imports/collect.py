"""From files to facts: each key taken, warned about, refused or ignored, and told."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.config.imports.deepspeed import DEEPSPEED
from src.config.imports.detect import detect
from src.config.imports.imported import MAX_FILES, Fact
from src.config.imports.reading import file_error, flatten, read_mapping, told, told_file
from src.config.imports.rules import Format, NotRepresentedError, Refuse, Take, Warn
from src.errors import UserError

_OFF: tuple[object, ...] = (None, False, "", 0, [], "none", "no", "NO", "false")
_STANDS_FOR = {
    "spread": "method",
    "reshard": "method",
    "launcher": "method",
    "engine_optimizer": "optimizer",
    "offload_states": "offload",
    "offload_weights": "offload",
    "half": "precision",
    "weights": "precision",
    "autocast": "precision",
    "adapter": "finetune",
    "bits": "finetune",
    "quant_type": "finetune.quantization",
    "quant_method": "finetune.quantization",
}
"""Facts and the key that, typed, goes before them."""
_WHOLE = frozenset(
    {"megatron_lm_config", "dynamo_config", "fp8_config", "deepspeed", "unfrozen_parameters"}
)


@dataclass(kw_only=True, slots=True)
class Collected:
    """What all files say.

    Attributes:
        typed: our keys that were typed; a file cannot be wrong about them.
        facts: by name; a training's file goes before one that launches it, then the later file.
        formats: each file's name and format, in order.
        warnings: one line a file, and one for each that matters for memory.
        from_training: facts that a training's file has said.
    """

    typed: Collection[str]
    facts: dict[str, Fact] = field(default_factory=dict)
    formats: list[tuple[str, Format]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    from_training: set[str] = field(default_factory=set)

    def read(self, file: str) -> None:
        """Add a file.

        Raises:
            UserError: it cannot be read, recognised, or represented.
        """
        try:
            path = Path(file).expanduser()
        except RuntimeError as error:
            raise file_error(file, "there is no such home folder") from error
        content = read_mapping(file, path)
        self.take(file, path, detect(file, content), content)

    def take(self, file: str, path: Path, form: Format, content: Mapping[str, Any]) -> None:
        """Add the content of a file of a known format."""
        if len(self.formats) >= MAX_FILES:
            raise file_error(file, f"more than {MAX_FILES} files")
        self.formats.append((file, form))
        place = len(self.warnings)
        sheet = _Sheet(file=file, path=path, form=form, collected=self)
        for key, value in flatten(content, _WHOLE):
            sheet.row(key, value)
        self.warnings.insert(place, sheet.line())

    def put(self, name: str, fact: Fact, *, is_training: bool) -> None:
        """Set a fact; where files differ, the one that goes first is told."""
        old = self.facts.get(name)
        keeps = old is not None and name in self.from_training and not is_training
        if old is not None and old.value != fact.value:
            first, other = (old, fact) if keeps else (fact, old)
            self.warnings.append(
                f"from: {first.written} of {told_file(first.file)} goes before "
                f"{other.written} of {told_file(other.file)}"
            )
        if keeps:
            return
        self.facts[name] = fact
        if is_training:
            self.from_training.add(name)


@dataclass(kw_only=True, slots=True)
class _Sheet:
    """What became of the keys of one file."""

    file: str
    path: Path
    form: Format
    collected: Collected
    taken: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def row(self, key: str, value: Any) -> None:
        """Decide what becomes of one key."""
        rule = self.form.rules.get(key)
        if key == "trust_remote_code":
            self.warn(key, value, "is typed, never taken from a file")
        elif rule is None:
            (self.harmless if self.form.is_harmless(key) else self.unknown).append(told(key))
        elif value is None or (not isinstance(rule, Take) and _is_off(value)):
            self.off.append(told(key))
        elif isinstance(rule, Take):
            self.fact(key, value, rule)
        elif isinstance(rule, Warn):
            self.warn(key, value, rule.reason, rule.unless)
        elif isinstance(rule, Refuse):
            self.refuse(key, value, rule)
        else:
            self.companion(key, value)

    def fact(self, key: str, value: Any, rule: Take) -> None:
        written = f"{told(key)}={told(value)}"
        if rule.fact in self.collected.typed:
            self.off.append(f"{told(key)} ({rule.fact} is typed)")
            return
        try:
            found = rule.convert(value)
        except NotRepresentedError as error:
            key_of_ours = _STANDS_FOR.get(rule.fact)
            if key_of_ours in self.collected.typed:
                self.off.append(f"{told(key)} ({key_of_ours} is typed)")
                return
            raise self.error(written, str(error)) from error
        if found is None:
            self.off.append(told(key))
            return
        self.taken.append(told(key))
        fact = Fact(value=found, file=self.file, written=written)
        self.collected.put(rule.fact, fact, is_training=self.form.is_training)

    def warn(self, key: str, value: Any, reason: str, unless: tuple[Any, ...] = ()) -> None:
        if value in unless:
            self.harmless.append(told(key))
            return
        self.warned.append(told(key))
        self.collected.warnings.append(
            f"from={told_file(self.file)}: {key}={told(value)}: {reason}"
        )

    def refuse(self, key: str, value: Any, rule: Refuse) -> None:
        if value not in rule.unless:
            raise self.error(f"{told(key)}={told(value)}", rule.reason)
        self.harmless.append(told(key))

    def companion(self, key: str, value: Any) -> None:
        """A DeepSpeed config inside the file, or beside it."""
        if isinstance(value, Mapping):
            self.taken.append(key)
            inner = {str(name): inner_value for name, inner_value in value.items()}
            self.collected.take(f"{self.file}:{key}", self.path, DEEPSPEED, inner)
            return
        if not isinstance(value, str):
            raise self.error(f"{key}={told(value)}", "a DeepSpeed config or its file")
        file = self._beside(value)
        if file is None:
            reason = "there is no such file here; pass it too: from=[...,FILE.json]"
            self.warn(key, value, reason)
            return
        self.taken.append(key)
        self.collected.take(str(file), file, DEEPSPEED, read_mapping(str(file), file))

    def _beside(self, name: str) -> Path | None:
        try:
            places = (Path(name).expanduser(), self.path.parent / name)
            return next((place for place in places if place.is_file()), None)
        except (OSError, ValueError, RuntimeError):
            return None

    def error(self, written: str, reason: str) -> UserError:
        return UserError(key="from", value=f"{told_file(self.file)}: {written}", allowed=reason)

    def line(self) -> str:
        """What was understood, and what was ignored and why."""
        groups = (
            (self.warned, "not counted, see below"),
            (self.off, "off, null or left to others"),
            (self.harmless, "no effect on memory"),
            (self.unknown, "not known"),
        )
        ignored = [f"{', '.join(keys)} ({why})" for keys, why in groups if keys]
        taken = ", ".join(self.taken) or "nothing"
        rest = f"; ignored {'; '.join(ignored)}" if ignored else ""
        return f"from={told_file(self.file)} ({self.form.name}): took {taken}{rest}"


def _is_off(value: Any) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)
