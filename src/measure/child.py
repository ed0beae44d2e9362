"""A worker in a child process: lines in, lines out, and an end for all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]

ANYWHERE = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
"""The same answer wherever it runs: nothing is downloaded."""

WITHOUT_GPU = {**ANYWHERE, "CUDA_VISIBLE_DEVICES": ""}
"""The same, and no GPU is looked at."""

_LAST_LINES = 20
_FARE_WELL_S = 5


class ChildEndedError(Exception):
    """The child cannot be started, or ended instead of answering; says how."""


class Child:
    """One worker process, which leads a session and a process group of its own.

    Args:
        command: its command line.
        environment: variables that are set on top of this process's.

    Raises:
        ChildEndedError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._replies: SimpleQueue[str | None] = SimpleQueue()
        self._last_words: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=ROOT,
                env={**os.environ, **environment, "PYTHONPATH": path},
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ChildEndedError(f"its process cannot be started: {error.strerror}") from error
        self._readers = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_replies, self._read_last_words)
        ]
        for reader in self._readers:
            reader.start()

    def send(self, line: str) -> None:
        """Give the child a line.

        Raises:
            ChildEndedError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            self._raise_ended()

    def receive(self, time_limit_s: float) -> str | None:
        """The child's next line; None where it gave none in time.

        Raises:
            ChildEndedError: it ended instead.
        """
        try:
            reply = self._replies.get(timeout=max(0.0, time_limit_s))
        except Empty:
            return None
        if reply is None:
            self._raise_ended()
        return reply

    def end(self) -> None:
        """Kill the group and collect the child."""
        with suppress(ProcessLookupError, PermissionError):  # its group has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(_FARE_WELL_S)
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        for stream in streams:
            assert stream is not None
            with suppress(OSError):  # what was left to write has no reader
                stream.close()

    def _raise_ended(self) -> NoReturn:
        """Say how the child ended."""
        try:
            code = self._process.wait(_FARE_WELL_S)
        except subprocess.TimeoutExpired:
            raise ChildEndedError("its process closed its output and lives on") from None
        self._readers[1].join(_FARE_WELL_S)
        words = next((line for line in reversed(self._last_words) if line), "no message")
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        hint = " (out of host memory?)" if code == -signal.SIGKILL else ""
        raise ChildEndedError(f"its process ended with {how}{hint}: {words[:300]}")

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _read_last_words(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_words.append(line.strip())
