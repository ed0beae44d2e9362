"""What others measured and published, as rows: each line becomes one, or is told why not.

A table is a CSV file with the columns of `COLUMNS`, or a benchmark file of another project that
`src.config.benchmarks` puts in those words. Nothing is guessed: a line whose words are not among
those below, or that ran other model code than transformers', is refused with its reason.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.architecture import describe
from src.config import zoo
from src.config.benchmarks import HAND_WRITTEN, PADDED, Line, fms_lines, is_fms, is_peft, peft_line
from src.config.command import emit, warn
from src.config.gpu import load_gpu
from src.config.model import resolve_model
from src.config.published_words import (
    ATTENTIONS,
    CHECKPOINTINGS,
    MODELS,
    NO,
    OPTIMIZERS,
    PRECISIONS,
    REMARKS,
    level_of,
    loss_of,
    read_finetune,
    read_method,
    to_bytes,
    versions_of,
)
from src.config.zoo import CONF
from src.errors import UserError
from src.measure.client import case_of
from src.record import LENGTHS, VARYING, Outcome, Provenance, Row, Source, add_rows, read_rows
from src.spec import Job, Layout, Loss, Step
from src.units import MIB

COLUMNS = (
    "id",
    "source_url",
    "date_or_version",
    "gpu_model",
    "gpu_count",
    "framework",
    "model_id",
    "method",
    "finetune",
    "precision",
    "optimizer",
    "micro_batch_per_gpu",
    "seq_len",
    "grad_checkpointing",
    "attention",
    "compile",
    "cpu_offload",
    "other",
    "measured_metric",
    "unit",
    "measured_value",
    "outcome",
    "confidence",
    "notes",
)
"""Columns that are read; others may stand between them."""

CAMPAIGN = "published"
_SMI_PEAK = re.compile(r"nvidia-smi memory\.used peak \([^)]*\) ([\d.]+) MiB")
_DATE = re.compile(r"\d{4}(-(0\d|1[0-2])(-[0-3]\d)?)?(?!\d)")
_OUTCOMES = {"fits": Outcome.OK, "oom": Outcome.OOM}


@dataclass(frozen=True, kw_only=True, slots=True)
class NotImported:
    """A line that is no row.

    Attributes:
        id: the line's id, or its number in the file.
        reason: why.
    """

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What a table holds.

    Attributes:
        rows: its rows, in order.
        refused: the lines that are none.
    """

    rows: tuple[Row, ...]
    refused: tuple[NotImported, ...]


def read_published(path: Path) -> Published:
    """The rows of a table, or of a benchmark file.

    Raises:
        UserError: the file cannot be read, or is none that is understood.
    """
    lines = _json_lines(path) if path.suffix == ".json" else _csv_lines(path)
    rows: dict[str, Row] = {}
    refused: list[NotImported] = []
    for number, line in enumerate(lines, start=2):
        name = f"line {number}"
        try:
            if isinstance(line, UserError):
                raise line
            name = line["id"] or name
            if name in rows:
                raise _refusal("id", name, "the same id twice")
            rows[name] = _row(name, line)
        except UserError as error:
            refused.append(NotImported(id=name, reason=str(error)))
    return Published(rows=tuple(rows.values()), refused=tuple(refused))


def _csv_lines(path: Path) -> Iterable[Line | UserError]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = reader.fieldnames or ()
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unread(path, error) from error
    if any(None in line or None in line.values() for line in lines):
        raise _refusal("import", path, "a line has more or fewer fields than there are columns")
    if is_fms(columns):
        return fms_lines(path, lines)
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise _refusal("import", path, f"has no columns {', '.join(missing)}")
    return lines


def _json_lines(path: Path) -> Iterable[Line | UserError]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unread(path, error) from error
    if not is_peft(content):
        allowed = "no result of PEFT's benchmark (run_info, train_info, meta_info)"
        raise _refusal("import", path, allowed)
    try:
        return [peft_line(path, content)]
    except UserError as error:
        return [
            UserError(key=f"{path.name}: {error.key}", value=error.value, allowed=error.allowed)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        allowed = f"a result of PEFT's benchmark, but for {error}"
        raise _refusal("import", path, allowed) from error


def _unread(path: Path, error: Exception) -> UserError:
    return _refusal("import", path, f"cannot be read ({error})")


def _refusal(key: str, value: object, allowed: str) -> UserError:
    return UserError(key=key, value=value, allowed=allowed)


def _row(name: str, line: Mapping[str, str]) -> Row:
    versions = versions_of(line["framework"])
    _check_plain(line)
    outcome = _word(line, "outcome", _OUTCOMES)
    peaks = _peaks(line) if outcome is Outcome.OK else {}
    step, loop, notes = _step(line, versions)
    case = json.loads(json.dumps({**case_of(step), "loop": loop, "device": "cuda"}))
    url = line["source_url"]
    return Row(
        case=case,
        outcome=outcome,
        source=Source.PUBLISHED,
        comm="none" if step.layout.num_gpus == 1 else "nccl",
        provenance=Provenance(
            campaign=CAMPAIGN, started=_date(line["date_or_version"]), duration_s=0, url=url
        ),
        peak_bytes=peaks,
        environment={
            "id": name,
            "gpu": line["gpu_model"],
            **({LENGTHS: VARYING} if PADDED in line["other"] else {}),
        },
        versions=versions,
        notes=tuple(note for note in (*notes, line["notes"]) if note),
    )


def _check_plain(line: Mapping[str, str]) -> None:
    """Refuse what no setting of a step says."""
    if line["confidence"] == "low":
        raise _refusal("confidence", "low", "too unsure to learn from")
    for key in ("compile", "cpu_offload"):
        if line[key] != NO:
            raise _refusal(key, line[key], "no setting of ours")
    for remark in line["other"].split("; "):
        known = [words for words in REMARKS if remark.startswith(words)]
        if remark and not known:
            raise _refusal("other", remark, "no setting of ours")


def _word(line: Mapping[str, str], key: str, known: Mapping[str, Any]) -> Any:
    if line[key] not in known:
        raise _refusal(key, line[key] or "''", "not among what is understood")
    return known[line[key]]


def _number(line: Mapping[str, str], key: str) -> int:
    if not line[key].isdecimal() or int(line[key]) < 1:
        raise _refusal(key, line[key] or "''", "no whole number of 1 or more")
    return int(line[key])


def _peaks(line: Mapping[str, str]) -> dict[str, int]:
    level = level_of(line["measured_metric"])
    if level is None:
        raise _refusal("measured_metric", line["measured_metric"], "does not say which level")
    peaks = {level: to_bytes(line["measured_value"], line["unit"])}
    also = _SMI_PEAK.search(line["notes"])
    if also is not None and level != "device":
        peaks["device"] = round(float(also[1]) * MIB)
    return peaks


def _step(
    line: Mapping[str, str], versions: Mapping[str, str]
) -> tuple[Step, dict[str, Any], list[str]]:
    """The step, how its loop departs from the Trainer's of today, and what was assumed."""
    precision, precision_loop = _word(line, "precision", PRECISIONS)
    attention, assumed = _word(line, "attention", ATTENTIONS)
    method, loop = read_method(line["method"])
    finetune = read_finetune(line["finetune"], line["other"])
    loss = loss_of(versions.get("transformers"))
    count = _number(line, "gpu_count")
    is_sharded = method.is_fsdp or method.is_zero
    sku = zoo.find("gpu", line["gpu_model"])
    if sku is None:
        raise _refusal("gpu_model", line["gpu_model"], "not among the known GPUs")
    name = MODELS.get(line["model_id"]) or zoo.find("model", line["model_id"])
    if name is None:
        raise _refusal("model_id", line["model_id"], "not in the zoo")
    model, _ = resolve_model(name, arch={}, trust_remote_code=False)
    job = Job(
        model=model,
        finetune=finetune,
        seq_len=_number(line, "seq_len"),
        precision=precision,
        optimizer=_word(line, "optimizer", OPTIMIZERS),
        checkpointing=_word(line, "grad_checkpointing", CHECKPOINTINGS),
        attention=attention,
        loss=loss,
    )
    step = Step(
        job=job,
        method=method,
        layout=Layout(dp=count, shard=count if is_sharded else 1),
        gpu=load_gpu(sku),
        micro_batch=_number(line, "micro_batch_per_gpu"),
    )
    if loss is Loss.STANDARD_4X and finetune.is_quantized and describe(model).has_experts:
        allowed = "experts were Linears then, which bitsandbytes quantises; now they are stacked"
        raise _refusal("framework", f"transformers {versions['transformers']}", allowed)
    if loss is Loss.STANDARD_4X:
        loop |= {"reentrant_checkpointing": True, "attention_mask_input": True, "use_cache": True}
    if HAND_WRITTEN in line["other"]:
        loop |= {"hold_outputs": True, "trainer_groups": False, "attention_mask_input": True}
    if "milabench" in line["framework"]:
        loop |= {"hold_outputs": True, "max_grad_norm": 0.0, "trainer_groups": False}
    return step, loop | precision_loop, [assumed] if assumed else []


def _date(text: str) -> str:
    """The first day that a date may mean."""
    found = _DATE.match(text)
    if found is None:
        raise _refusal("date_or_version", text or "''", "no year")
    parts = (found[0] + "-01-01").split("-")[:3]
    return f"{'-'.join(parts)}T00:00:00+00:00"


def take_files(files: Sequence[Path], rows: Path | None) -> list[Path]:
    """Add the rows of files to files of rows, and tell each line that is none why; the latter.

    A file of rows (`.jsonl`), as another machine brought it, stays the file that it is, unless
    `rows` is another one. A file without a single row is told and left.

    Args:
        files: tables, benchmark files, files of rows.
        rows: where to; None: one for each table, in the project's profiling folder.

    Returns:
        The files that have rows now.

    Raises:
        UserError: a file cannot be read or not be written.
    """
    found = [(file, _read_any(file)) for file in files]
    taken: dict[Path, None] = {}
    for file, (mine, refused) in found:
        warn(f"{line.id} not imported: {line.reason}" for line in refused)
        is_rows = file.suffix == ".jsonl"
        own = file if is_rows else CONF.parent / "profiling" / CAMPAIGN / f"{file.stem}.jsonl"
        target = rows or own
        if not mine:
            emit(f"{file}: no rows; {len(refused)} lines are none\n")
            continue
        what = f"{len(mine)} rows"
        if target != file:
            what = f"{add_rows(target, mine)} of {what} are new"
        emit(f"{target}: {what}; {len(refused)} lines are no rows\n")
        taken[target] = None
    if len(files) > 1:
        num_rows, num_refused = (sum(len(each[at]) for _, each in found) for at in (0, 1))
        emit(f"{len(files)} files: {num_rows} rows; {num_refused} lines are no rows\n")
    return list(taken)


def _read_any(file: Path) -> tuple[Sequence[Row], Sequence[NotImported]]:
    if file.suffix != ".jsonl":
        published = read_published(file)
        return published.rows, published.refused
    if not file.is_file():
        raise _refusal("import", file, "a file of rows that exists")
    found = read_rows(file)
    damaged = [NotImported(id=f"{file}:{bad.line}", reason=bad.reason) for bad in found.damaged]
    return found.rows, damaged
