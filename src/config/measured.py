"""`measured=FILE`: a row of `src.record`, or PyTorch's memory snapshot as JSON; never a pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from src.errors import UserError
from src.measure.recorded import Recorded, is_snapshot, read_recorded
from src.plan.gap.explain import choose, explain_recording, explain_row, read_case
from src.plan.gap.result import Gap
from src.plan.result import Report
from src.plan.search import Estimator
from src.record import Row
from src.spec import Request

KEY = "measured"
_PICKLES = (".pickle", ".pkl")
_PICKLED = b"\x80"
_ZIPPED = b"PK"
_NO_PICKLE = (
    "a pickle runs what its writer wants, so none is read; where it was recorded, python -c "
    "\"import json,pickle,sys; json.dump(pickle.load(open(sys.argv[1],'rb')),"
    "open(sys.argv[2],'w'))\" FILE.pickle FILE.json makes JSON of it"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What an estimate is held against: one of the two.

    Attributes:
        file: as it was typed.
        row: a row.
        recorded: a snapshot's GPU.
    """

    file: str
    row: Row | None = None
    recorded: Recorded | None = None

    def explain(self, report: Report, estimator: Estimator) -> Gap:
        """The gap of a report to it.

        Args:
            report: the answer.
            estimator: who gave it.

        Raises:
            UserError: the row has nothing to compare.
        """
        if self.row is not None:
            return explain_row(report, estimator, self.row, self.file)
        assert self.recorded is not None
        return explain_recording(report, estimator, self.recorded, self.file)


def read_measured(text: str, request: Request) -> Measured:
    """The row or snapshot that is asked for; of several rows the one of the asked job.

    Args:
        text: as it was typed.
        request: the question.

    Raises:
        UserError: there is no such file or row, or it is of another form.
    """
    path, wanted = _split(text)
    content = _content(path, text)
    whole = _json(content)
    if is_snapshot(whole):
        return Measured(file=text, recorded=_recorded(whole, wanted, text))
    rows = _rows(whole, content, text)
    every = [row for _, row in rows]
    row = _wanted(rows, wanted, text) if wanted else choose(every, request, text)
    read_case(row, text)
    return Measured(file=text, row=row)


def _refuse(text: str, allowed: str) -> NoReturn:
    raise UserError(key=KEY, value=text, allowed=allowed)


def _split(text: str) -> tuple[Path, str]:
    """The file, and what is wanted of it."""
    whole = Path(text).expanduser()
    name, colon, wanted = text.rpartition(":")
    if whole.exists() or not colon or not wanted:
        return whole, ""
    return Path(name).expanduser(), wanted


def _content(path: Path, text: str) -> bytes:
    if path.suffix.casefold() in _PICKLES:
        _refuse(text, _NO_PICKLE)
    if path.is_dir():
        _refuse(text, "a file, not a folder")
    try:
        content = path.read_bytes()
    except OSError as error:
        _refuse(text, f"cannot be read ({error.strerror})")
    if content.startswith((_PICKLED, _ZIPPED)):
        _refuse(text, _NO_PICKLE)
    if not content.strip():
        _refuse(text, "is empty; a row or a snapshot is needed")
    return content


def _json(content: bytes) -> Any:
    """The file as one JSON value; None where it is none, as with lines of rows."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _recorded(snapshot: dict[str, Any], wanted: str, text: str) -> Recorded:
    if wanted and not wanted.isdecimal():
        _refuse(text, "of a snapshot, :N is the number of a GPU")
    try:
        return read_recorded(snapshot, device=int(wanted) if wanted else None)
    except UserError as error:
        _refuse(text, f"{error.value}: {error.allowed}")


def _rows(whole: Any, content: bytes, text: str) -> list[tuple[int, Row]]:
    """Rows with the numbers of their lines."""
    if whole is not None:
        return [(1, _row(whole, text, "it"))]
    found = []
    reason = ""
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, _row(json.loads(line), text, f"line {number}")))
        except (ValueError, RecursionError) as error:
            reason = reason or f"line {number} is no JSON ({error})"
        except UserError as error:
            reason = reason or error.allowed
    if not found:
        _refuse(text, f"has neither rows nor a snapshot: {reason}")
    return found


def _row(raw: Any, text: str, what: str) -> Row:
    if not isinstance(raw, dict) or "row_id" not in raw:
        _refuse(
            text,
            f"{what} is neither a row of src.record (row_id, case, ...) nor a snapshot "
            "(segments, device_traces)",
        )
    try:
        return Row.from_json(raw)
    except UserError as error:
        _refuse(text, f"{what} is a damaged row: {error.allowed}")


def _wanted(rows: Sequence[tuple[int, Row]], wanted: str, text: str) -> Row:
    """A row by the number of its line, or by one of its ids."""
    found = [row for _, row in rows if row.row_id == wanted]
    found = found or [row for _, row in rows if row.case_id == wanted]
    found = found or [row for number, row in rows if str(number) == wanted]
    if len(found) != 1:
        ids = ", ".join(row.row_id for row in found or [row for _, row in rows][:8])
        _refuse(text, f"{len(found)} rows are {wanted}; by row_id: {ids}")
    return found[0]
