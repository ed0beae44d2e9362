"""Commands in this process: what they would print and return, without a second of imports."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

from src.config import run_command


def run_here(
    run: Callable[[list[str]], int], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """The command whose arguments `run` takes, in a folder, as one in a process of its own."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        code = run_command(lambda: run(list(arguments)))
    return subprocess.CompletedProcess(list(arguments), code, stdout.getvalue(), stderr.getvalue())
