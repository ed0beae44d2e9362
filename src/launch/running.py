"""A campaign's cases as jobs: this process submits them, and alone writes the campaign's rows."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.launch.submission import Job, Jobs, Submitter
from src.measure.rows import RankEnd, make_row, num_gpus_of
from src.measure.runner import Conditions, run_cases
from src.record import Outcome, Provenance, Row, RowFile, case_id_of, open_rows, read_rows

_POLL_S = 0.5
_LATE_S = 30.0
"""How much later than a job's end a shared folder may show what the job wrote."""


def run_campaign(
    cases: Sequence[Mapping[str, Any]],
    file: RowFile,
    conditions: Conditions,
    jobs: Jobs | None,
) -> Iterator[Row]:
    """Run the cases that have no row yet; each row is in the file before it is yielded.

    Args:
        cases: the cases.
        file: of their rows.
        conditions: how they are run.
        jobs: the jobs that they become; None: child processes of this one.

    Raises:
        UserError: a row cannot be written, or no job can be submitted.
    """
    if jobs is None:
        return run_cases(cases, file, conditions)
    return run_jobs(cases, file, conditions, jobs)


def run_jobs(
    cases: Sequence[Mapping[str, Any]],
    file: RowFile,
    conditions: Conditions,
    jobs: Jobs,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """The same, each case as one job. None is submitted after the budget.

    Jobs live on if this process is killed: the next one takes what they came to, and waits for
    those that are not over. They are cancelled if it ends in another way (Ctrl-C).

    Raises:
        UserError: a row cannot be written, or no job can be submitted.
    """
    submitter = Submitter(jobs, name=conditions.campaign)
    known = {row.case_id for row in file.rows}
    todo = {case_id_of(case): case for case in cases}
    waiting = deque(case for case_id, case in todo.items() if case_id not in known)
    running: list[_CaseJob] = []
    end = None if conditions.budget_s is None else clock() + conditions.budget_s
    try:
        while True:
            while waiting and len(running) < jobs.max_jobs and (end is None or clock() < end):
                running.append(_CaseJob(waiting.popleft(), conditions, jobs))
                running[-1].start(submitter)
            for job in list(running):
                row = job.row()
                if row is not None:
                    file.append(row)
                    running.remove(job)
                    job.forget()
                    yield row
            if not running and (not waiting or (end is not None and clock() >= end)):
                return
            time.sleep(_POLL_S)
    finally:
        for job in running:
            job.cancel()


@dataclass(slots=True)
class _CaseJob:
    """A case and its job. Three files bear the case's id: case, rows, and the job's id."""

    case: Mapping[str, Any]
    conditions: Conditions
    jobs: Jobs
    job: Job | None = None
    seen_over: float | None = None
    begun: float = field(default_factory=time.monotonic)
    started: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )

    def _path(self, suffix: str) -> Path:
        return self.jobs.folder / f"{case_id_of(self.case)}{suffix}"

    def start(self, submitter: Submitter) -> None:
        """Submit it, unless its job has left a row or is known to the cluster."""
        if self._found() is not None:
            return
        with suppress(FileNotFoundError):
            earlier = submitter.find(self._path(".job").read_text("utf-8"))
            if earlier.is_known or self._is_written():
                self.job = earlier
                return
        try:
            self._path(".case.jsonl").write_text(json.dumps(self.case) + "\n", "utf-8")
            self.job = submitter.submit(*self._arguments(), num_gpus=self._num_gpus())
            self._path(".job").write_text(self.job.job_id, "utf-8")
        except OSError as error:
            allowed = f"cannot be written ({error.strerror})"
            raise UserError(
                key="launcher.folder", value=self.jobs.folder, allowed=allowed
            ) from error

    def _arguments(self) -> list[str]:
        asked = {
            "--run-many": self._path(".case.jsonl"),
            "--rows": self._path(".jsonl"),
            "--campaign": self.conditions.campaign,
            "--timeout-s": f"{self.conditions.timeout_s:g}",
        }
        words = [str(word) for pair in asked.items() for word in pair]
        return ["-m", "src.measure.worker", *words]

    def _num_gpus(self) -> int:
        """All of the case's GPUs if a node has them; else one, as rank 0 alone."""
        if self.case.get("device") != "cuda":
            return 0
        asked = num_gpus_of(self.case)
        return asked if asked <= self.jobs.gpus_per_node else 1

    def _found(self) -> Row | None:
        mine = case_id_of(self.case)
        rows = read_rows(self._path(".jsonl")).rows
        return next((row for row in rows if row.case_id == mine), None)

    def row(self) -> Row | None:
        """What came of it; None while that is open."""
        found = self._found()
        if self.job is None or (found is not None and self.jobs.is_slurm):
            return found
        if not self.job.is_over or self._is_written():
            return None
        if found is not None:
            return found
        self.seen_over = self.seen_over or time.monotonic()
        if self.jobs.is_slurm and time.monotonic() - self.seen_over < _LATE_S:
            return None
        return self._found() or self._failed(self.job)

    def _failed(self, job: Job) -> Row:
        """The row of a job that left none."""
        outcome = Outcome.TIMEOUT if job.is_out_of_time else Outcome.CRASHED
        message = f"{self.jobs.cluster} job {job.job_id} left no row ({job.state}): "
        end = RankEnd(outcome=outcome, message=message + job.last_words())
        provenance = Provenance(
            campaign=self.conditions.campaign,
            started=self.started,
            duration_s=round(time.monotonic() - self.begun, 3),
            git_commit=self.conditions.git_commit,
        )
        return make_row(self.case, [end], provenance)

    def cancel(self) -> None:
        """End it, so that the next campaign submits it again."""
        if self.job is not None:
            self.job.cancel()
            if self.jobs.is_slurm:  # a process here may take a while to end, and is asked then
                self._path(".job").unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove its files: its row is where it belongs."""
        for suffix in (".case.jsonl", ".jsonl", ".job"):
            self._path(suffix).unlink(missing_ok=True)

    def _is_written(self) -> bool:
        """Whether a process of this machine is adding rows: submitit forgets those of another."""
        path = self._path(".jsonl")
        if self.jobs.is_slurm or not path.exists():
            return False
        try:
            with open_rows(path):
                return False
        except UserError:
            return True
