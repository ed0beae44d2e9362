"""What every command does around its work: errors as one line, exit codes, broken pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from src.errors import UserError

EXIT_OK = 0
EXIT_WRONG_INPUT = 1
EXIT_NOTHING_FITS = 3
EXIT_DRIFT = 3
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141
_AT_ONCE = 4096


def emit(text: str) -> None:
    """Write an answer to stdout, whatever its encoding.

    Raises:
        UserError: stdout cannot be written (a full disk).
        BrokenPipeError: nobody reads it any more.
    """
    if sys.stdout is None:
        raise UserError(key="stdout", value="closed", allowed="the answer has to go somewhere")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        reason = f"cannot be written ({error.strerror})"
        raise UserError(key="output", value="stdout", allowed=reason) from error


def warn(warnings: Iterable[str]) -> None:
    """Write warnings to stderr, a line each."""
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)


def emit_all(pieces: Iterable[str]) -> None:
    """Write an answer to stdout as it comes, some thousand pieces at a time.

    Raises:
        UserError: stdout cannot be written (a full disk).
        BrokenPipeError: nobody reads it any more.
    """
    waiting: list[str] = []
    for piece in pieces:
        waiting.append(piece)
        if len(waiting) == _AT_ONCE:
            emit("".join(waiting))
            waiting.clear()
    emit("".join(waiting))


def run_command(work: Callable[[], int]) -> int:
    """The exit code of `work`; a UserError is printed as one line on stderr and gives 1."""
    try:
        return work()
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _EXIT_BROKEN_PIPE


def _drop_stdout() -> None:
    """Send what is left in stdout's buffer nowhere, as Python would try to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
