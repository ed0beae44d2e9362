"""A file of rows, one JSON line each: a row is in it whole and for good, or not at all.

A line is appended in one write and forced to the disk before `append` returns. What a crash or a
full disk leaves of a line is cut off, and kept beside the file under `<name>.damaged`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from src.errors import UserError
from src.record.row import Row, canonical

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Damaged:
    """A line that is no row.

    Attributes:
        line: its number in the file, from 1.
        text: what stands there.
        reason: why it is no row.
    """

    line: int
    text: str = field(repr=False)
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a file holds: its rows in order, and the lines that are none."""

    rows: tuple[Row, ...] = ()
    damaged: tuple[Damaged, ...] = ()


def read_rows(path: Path) -> Rows:
    """The rows of a file; of one that does not exist: none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Rows()
    except OSError as error:
        raise _error(path, f"cannot be read ({error.strerror})") from error
    return _parse(content)


def _parse(content: bytes) -> Rows:
    rows: list[Row] = []
    damaged: list[Damaged] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        text = line.decode("utf-8", "replace")
        if not text.strip():
            continue
        try:
            rows.append(Row.from_json(json.loads(text)))
        except json.JSONDecodeError as error:
            damaged.append(Damaged(line=number, text=text, reason=f"no JSON ({error.msg})"))
        except UserError as error:
            damaged.append(Damaged(line=number, text=text, reason=error.allowed))
        except (ValueError, RecursionError):
            reason = "no JSON that can be read (nested too deep, or a number too long)"
            damaged.append(Damaged(line=number, text=text, reason=reason))
    return Rows(rows=tuple(rows), damaged=tuple(damaged))


class RowFile:
    """An open file of rows that this process alone may write; `open_rows` makes one.

    Attributes:
        path: the file.
        rows: what it holds, in order.
        damaged: the lines in it that are no rows; the last line, if it was one, is set aside.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        found = _parse(self._repair())
        self.rows = list(found.rows)
        self.damaged = found.damaged

    def append(self, row: Row) -> None:
        """Add a row; it is on the disk when this returns.

        Raises:
            UserError: it cannot be written; the file is as it was.
        """
        line = canonical(row.to_json()).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            _write(self._descriptor, line)
        except OSError as error:
            with suppress(OSError):  # then the next process to open the file sets it aside
                os.ftruncate(self._descriptor, size)
            raise _error(self.path, f"cannot be written ({error.strerror})") from error
        self.rows.append(row)

    def _repair(self) -> bytes:
        """The content, in which every line ends, once a last line that is no JSON is set aside."""
        content = _content(self._descriptor)
        whole, newline, last = content.rpartition(b"\n")
        if not last:
            whole, newline, last = whole.rpartition(b"\n")
        if not last or _is_json(last):
            if content and not content.endswith(b"\n"):
                _write(self._descriptor, b"\n")
            return content
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with aside.open("ab") as stream:
            _write(stream.fileno(), last + b"\n")
        os.ftruncate(self._descriptor, len(whole + newline))
        os.fsync(self._descriptor)
        return whole + newline


def _content(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@contextmanager
def open_rows(path: Path, *, wait_s: float = 0.0) -> Iterator[RowFile]:
    """The file, made with its folders if need be, and locked until the context ends.

    The lock is advisory (`flock`), and gone when this process is, however it ends.

    Args:
        path: the file.
        wait_s: seconds to wait for another process that has it open.

    Raises:
        UserError: another process has it open, or it cannot be made or read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise _error(path, f"cannot be written ({error.strerror})") from error
    try:
        _lock(path, descriptor, wait_s)
        _sync_folder(path.parent)
        try:
            file = RowFile(path, descriptor)
        except OSError as error:
            raise _error(path, f"cannot be repaired ({error.strerror})") from error
        yield file
    finally:
        os.close(descriptor)


def add_rows(path: Path, rows: Iterable[Row]) -> int:
    """Add the rows that a file does not hold yet; how many those were.

    Raises:
        UserError: another process has it open, or it cannot be written.
    """
    with open_rows(path) as file:
        known = {row.row_id for row in file.rows}
        fresh = {row.row_id: row for row in rows if row.row_id not in known}
        for row in fresh.values():
            file.append(row)
    return len(fresh)


def _lock(path: Path, descriptor: int, wait_s: float) -> None:
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise _error(path, "another process is adding rows to it") from None
            time.sleep(_POLL_S)
        except OSError as error:
            raise _error(path, f"cannot be locked ({error.strerror})") from error
        else:
            return


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _error(path: Path, reason: str) -> UserError:
    return UserError(key="rows", value=path, allowed=reason)
