"""Cases, each in fresh child processes: every outcome is a row, and no row is lost.

This process imports no torch and touches no GPU.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from src.errors import UserError
from src.measure.child import ANYWHERE, ROOT, WITHOUT_GPU, Child, ChildEndedError
from src.measure.rows import RankEnd, make_row, num_gpus_of
from src.record import Outcome, Provenance, Row, RowFile, case_id_of

ONCE = (sys.executable, "-m", "src.measure.worker", "--once")
GPUS = (sys.executable, "-m", "src.measure.worker", "--gpus")
TIMEOUT_S = 300.0
"""Seconds that one case may take unless asked otherwise."""

_PROBE_S = 120.0
_GRACE_S = 10.0
"""How long ranks may take after one of them gave up: they may be waiting for it."""
_POLL_S = 0.05
_GIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """How a campaign's cases are run.

    Attributes:
        campaign: its name.
        timeout_s: seconds that one case may take.
        budget_s: seconds after which no case is started; None: no limit.
        num_gpus: CUDA GPUs that are visible. A case on at most as many runs with NCCL, one on more
            as rank 0 of a group that sends nothing.
        git_commit: of this code.
        command: the child's command line.
    """

    campaign: str
    timeout_s: float = TIMEOUT_S
    budget_s: float | None = None
    num_gpus: int = 0
    git_commit: str | None = None
    command: Sequence[str] = ONCE


def run_cases(
    cases: Sequence[Mapping[str, Any]],
    file: RowFile,
    conditions: Conditions,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Run the cases that have no row yet; each row is in the file before it is yielded.

    Ends early where the next case is likely to end after the budget.

    Raises:
        UserError: a row cannot be written.
    """
    known = {row.case_id for row in file.rows}
    started, num_run = clock(), 0
    for case in cases:
        if case_id_of(case) in known:
            continue
        spent = clock() - started
        usual = spent / num_run if num_run else 0.0
        if conditions.budget_s is not None and spent + usual > conditions.budget_s:
            return
        row = run_case(case, conditions)
        file.append(row)
        known.add(row.case_id)
        num_run += 1
        yield row


def run_case(case: Mapping[str, Any], conditions: Conditions) -> Row:
    """The row of one case, whatever becomes of its processes; they are gone afterwards."""
    begun, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    num_ranks = _num_ranks(case, conditions.num_gpus)
    ends = _run_ranks(case, num_ranks, conditions)
    provenance = Provenance(
        campaign=conditions.campaign,
        started=started,
        duration_s=round(time.monotonic() - begun, 3),
        git_commit=conditions.git_commit,
    )
    return make_row(case, ends, provenance)


def _num_ranks(case: Mapping[str, Any], num_gpus: int) -> int:
    if case.get("device") != "cuda":
        return 1
    asked = num_gpus_of(case)
    return asked if asked <= num_gpus else 1


def _run_ranks(case: Mapping[str, Any], num_ranks: int, conditions: Conditions) -> list[RankEnd]:
    port, line = _free_port() if num_ranks > 1 else 0, json.dumps(case)
    with ExitStack() as stack:
        children: list[Child | ChildEndedError] = []
        for rank in range(num_ranks):
            try:
                child = Child(conditions.command, _environment(case, rank, num_ranks, port))
                stack.callback(child.end)
                child.send(line)
                children.append(child)
            except ChildEndedError as error:
                children.append(error)
        return _wait(children, conditions.timeout_s)


def _wait(children: Sequence[Child | ChildEndedError], timeout_s: float) -> list[RankEnd]:
    """How each rank ends; once one has failed, the others have a moment left."""
    give_up = time.monotonic() + timeout_s
    ends: dict[int, RankEnd] = {}
    while len(ends) < len(children):
        for rank, child in enumerate(children):
            if rank in ends:
                continue
            left = give_up - time.monotonic()
            end = _end(child, left if len(children) == 1 else min(left, _POLL_S))
            if end is None and left <= 0:
                end = RankEnd(outcome=Outcome.TIMEOUT, message=f"ended after {timeout_s:g} s")
            if end is None:
                continue
            ends[rank] = end
            if end.outcome is not Outcome.OK:
                give_up = min(give_up, time.monotonic() + _GRACE_S)
    return [ends[rank] for rank in range(len(children))]


def _end(child: Child | ChildEndedError, wait_s: float) -> RankEnd | None:
    """How one rank ended; None where it has not after `wait_s`."""
    if isinstance(child, ChildEndedError):
        return RankEnd(outcome=Outcome.CRASHED, message=str(child))
    try:
        text = child.receive(wait_s)
    except ChildEndedError as error:
        return RankEnd(outcome=Outcome.CRASHED, message=str(error))
    if text is None:
        return None
    try:
        reply = json.loads(text)
        if "error" in reply:
            return RankEnd(outcome=Outcome.CRASHED, message=str(_error(reply["error"])))
        answer = reply["row"]
        return RankEnd(outcome=Outcome(answer["outcome"]), answer=answer)
    except (KeyError, TypeError, ValueError):
        message = f"its process answered with what is no row: {text[:80]!r}"
        return RankEnd(outcome=Outcome.CRASHED, message=message)


def _error(words: Mapping[str, Any]) -> UserError:
    return UserError(key=str(words["key"]), value=words["value"], allowed=str(words["allowed"]))


def _environment(case: Mapping[str, Any], rank: int, num_ranks: int, port: int) -> dict[str, str]:
    if case.get("device") != "cuda":
        return WITHOUT_GPU
    if num_ranks == 1:
        return ANYWHERE
    return {
        **ANYWHERE,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def visible_gpus(command: Sequence[str] = GPUS) -> list[dict[str, Any]]:
    """What torch says about each CUDA GPU, asked in a child process.

    Raises:
        UserError: there is none, or the child gave no answer.
    """
    try:
        child = Child(command, ANYWHERE)
        try:
            text = child.receive(_PROBE_S)
        finally:
            child.end()
    except ChildEndedError as error:
        raise UserError(key="device", value="cuda", allowed=str(error)) from error
    if text is None:
        allowed = f"torch did not say within {_PROBE_S:g} s which GPUs there are"
        raise UserError(key="device", value="cuda", allowed=allowed)
    reply = json.loads(text)
    if "error" in reply:
        raise _error(reply["error"])
    found: list[dict[str, Any]] = reply["row"]
    return found


def git_commit() -> str | None:
    """The commit of this code, `-dirty` after it if tracked files were changed; None: unknown."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    words = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *command],
                capture_output=True,
                text=True,
                timeout=_GIT_S,
                check=True,
                env=environment,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        words.append(done.stdout.strip())
    return f"{words[0]}-dirty" if words[1] else words[0]
