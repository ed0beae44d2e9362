"""One case as one job of a cluster, through submitit.

What is submitted is a command line, `python -m src.measure.worker --run-many`, and what comes back
is the file of rows that it writes: text. submitit itself pickles the command into its folder, where
the job reads it, and the job pickles what the command printed; that file is never opened here. The
folder is made for this user alone.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.measure.child import ROOT

_LAST_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Jobs:
    """The jobs that a campaign's cases become.

    Attributes:
        cluster: submitit's name of what runs them: `slurm`; `local`: processes of this machine.
        folder: where their files are; every node sees it.
        max_jobs: jobs at a time, waiting ones included.
        gpus_per_node: GPUs that a job may have: one node's.
        minutes: time limit of a job.
        partition, account, qos, constraint: as sbatch takes them; None: not given.
        sbatch: further options of sbatch, without dashes; True: it has no value.
    """

    cluster: str
    folder: Path
    max_jobs: int
    gpus_per_node: int
    minutes: int
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch: Mapping[str, str | bool]

    @property
    def is_slurm(self) -> bool:
        """Whether SLURM runs them."""
        return self.cluster == "slurm"


class Submitter:
    """Hands command lines to a cluster.

    Args:
        jobs: how.
        name: of every job.

    Raises:
        UserError: submitit is not installed, the folder cannot be made, or there is no cluster.
    """

    def __init__(self, jobs: Jobs, *, name: str) -> None:
        try:
            import submitit
        except ImportError as error:
            allowed = "needs submitit: pip install 'submitit>=1.5'"
            raise UserError(key="launcher", value="slurm", allowed=allowed) from error
        self._submitit: Any = submitit
        try:
            jobs.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._executor = submitit.AutoExecutor(folder=jobs.folder, cluster=jobs.cluster)
        except OSError as error:
            allowed = f"cannot be made ({error.strerror})"
            raise UserError(key="launcher.folder", value=jobs.folder, allowed=allowed) from error
        except RuntimeError as error:
            allowed = "only where sbatch and srun are; launcher.cluster=local tries it out"
            raise UserError(key="launcher", value=jobs.cluster, allowed=allowed) from error
        self._jobs = jobs
        self._executor.update_parameters(name=name, tasks_per_node=1, timeout_min=jobs.minutes)
        if jobs.is_slurm:
            # SLURM runs no case again by itself: a job that was preempted is an outcome.
            more: dict[str, str | bool] = {"no-requeue": True, **jobs.sbatch}
            self._executor.update_parameters(
                slurm_partition=jobs.partition,
                slurm_account=jobs.account,
                slurm_qos=jobs.qos,
                slurm_constraint=jobs.constraint,
                slurm_additional_parameters=more,
            )

    def submit(self, *arguments: str, num_gpus: int) -> Job:
        """`python` with the arguments as a job.

        Raises:
            UserError: the cluster refuses it.
        """
        self._executor.update_parameters(gpus_per_node=num_gpus)
        work = self._submitit.helpers.CommandFunction([sys.executable, *arguments], cwd=ROOT)
        try:
            return Job(self._executor.submit(work))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            line = next((line for line in str(error).splitlines() if line.strip()), "")
            allowed = f"{self._jobs.cluster} refuses a job ({line[:300]})"
            raise UserError(key="launcher", value=self._jobs.cluster, allowed=allowed) from error

    def find(self, job_id: str) -> Job:
        """A job that an earlier process submitted from the same folder."""
        kind: Any = self._submitit.LocalJob
        if self._jobs.is_slurm:
            kind = self._submitit.SlurmJob
        return Job(kind(self._jobs.folder, job_id))


class Job:
    """A job, waiting, running or over; its results are not looked at."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.job_id: str = job.job_id

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return bool(self._job.done()) or "PREEMPTED" in self.state

    @property
    def state(self) -> str:
        """What the cluster calls its state, in capitals."""
        return str(self._job.state).upper()

    @property
    def is_known(self) -> bool:
        """Whether the cluster can tell how it ended, or that it has not."""
        return "NO PROCESS" not in self.state

    @property
    def is_out_of_time(self) -> bool:
        """Whether it was ended at its time limit."""
        return "TIMEOUT" in self.state or "this job is timed-out" in self._log()

    def last_words(self) -> str:
        """The last line that it wrote, in a few words."""
        lines = [line.strip() for line in self._log().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"

    def cancel(self) -> None:
        """Ask the cluster to end it."""
        self._job.cancel(check=False)

    def _log(self) -> str:
        try:
            content: bytes = self._job.paths.stderr.read_bytes()
        except OSError:
            return ""
        return content[-_LAST_BYTES:].decode("utf-8", "replace")


def read_options(text: str) -> dict[str, str | bool]:
    """The options of sbatch as they are typed, `--nice=100 --exclusive`.

    Raises:
        UserError: a word is no long option.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(key="launcher.sbatch", value=text, allowed=str(error)) from error
    found: dict[str, str | bool] = {}
    for word in words:
        name, separator, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or "\n" in word:
            allowed = "long options with =, as --nice=100 --exclusive"
            raise UserError(key="launcher.sbatch", value=text, allowed=allowed)
        found[name] = value if separator else True
    return found
