"""What every command does around its work: errors as one line, exit codes, broken pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from src.errors import UserError

EXIT_OK = 0
EXIT_WRONG_INPUT = 1
EXIT_NOTHING_FITS = 3
_EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 141


def run_command(work: Callable[[], int]) -> int:
    """The exit code of `work`; a UserError is printed as one line on stderr and gives 1."""
    try:
        code = work()
        sys.stdout.flush()
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader is gone (`| head`); what is left in the buffer must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    return code
