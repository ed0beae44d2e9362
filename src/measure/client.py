"""Dry runs in a child process: an estimator that imports no torch.

The child is `python -m src.measure.worker --serve`: it imports torch once and answers case after
case. It has a session of its own, so that all of it can be ended at once; it ends by itself when
this process does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from src.errors import NotCoveredError, UserError
from src.measure.child import WITHOUT_GPU, Child, ChildEndedError
from src.measure.events import Instant, Owner
from src.measure.timeline import Timeline
from src.memory.levels import SLACK_AT_CAPACITY, upper_levels
from src.spec import DRY_RUN_LIMIT_S, Step
from src.units import Levels

COMMAND = (sys.executable, "-m", "src.measure.worker", "--serve")


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunEstimate:
    """What the dry run says of one step; `ledger` is instants x owners, level `allocated`.

    Attributes:
        peak_bytes: per level; where the step does not fit, what it would need.
        upper_bytes: upper bound per level: allocated and reserved +5 %, context and NCCL +25 %.
        peak_instant: the instant that sets the peak.
        ledger: live bytes by owner at each instant's largest moment.
        notes: library versions, what was assumed, where it ran out of memory.
        num_parameters: the model's own parameters, without adapters.
        num_trainable_parameters: those that are trained, adapters included.
        timeline: live bytes over the step; None where it was not asked for.
        host_bytes: not known: what is on the host is not followed.
    """

    peak_bytes: Levels
    upper_bytes: Levels
    peak_instant: Instant
    ledger: Mapping[Instant, Mapping[Owner, int]]
    notes: tuple[str, ...]
    num_parameters: int
    num_trainable_parameters: int
    timeline: Timeline | None
    host_bytes: None = None


def case_of(step: Step) -> dict[str, Any]:
    """The step as the worker's JSON case."""
    job = step.job
    model = {"name": job.model.name, "hf_id": job.model.hf_id, "config": dict(job.model.config)}
    parts = {"model": model, "finetune": asdict(job.finetune), "zero": asdict(job.zero)}
    return {
        **{item.name: getattr(job, item.name) for item in fields(job)},
        **parts,
        "micro_batch": step.micro_batch,
        "method": step.method,
        "layout": asdict(step.layout),
        "gpu": asdict(step.gpu),
    }


def read_row(row: Mapping[str, Any], *, capacity_bytes: int) -> DryRunEstimate:
    """The worker's row as an estimate.

    Raises:
        KeyError, TypeError, ValueError: it is of another form.
    """
    reservation, allocated = row["reservation"], int(row["peak_bytes"])
    outside, reserved = int(reservation["outside_bytes"]), int(reservation["reserved_bytes"])
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    notes = [f"simulated with {versions}", *map(str, row["notes"])]
    needed = reservation["oom_needed_bytes"]
    if needed is not None:
        least = round(allocated * (1 + SLACK_AT_CAPACITY))
        reserved = max(least, int(needed) - outside)
        message = str(reservation["oom_message"]).split(" GPU ", 1)[0]
        notes.append(f"at {reservation['oom_instant']}: {message}")
    peak = Levels(allocated=allocated, reserved=reserved, device=reserved + outside)
    timeline = row.get("timeline")
    return DryRunEstimate(
        peak_bytes=peak,
        upper_bytes=_upper(peak, outside=outside, capacity=capacity_bytes),
        peak_instant=Instant(row["peak_instant"]),
        ledger={
            Instant(instant): {Owner(owner): int(size) for owner, size in column.items()}
            for instant, column in row["ledger"].items()
        },
        notes=tuple(notes),
        num_parameters=int(row["num_parameters"]),
        num_trainable_parameters=int(row["num_trainable_parameters"]),
        timeline=None if timeline is None else Timeline.from_json(timeline),
    )


def _upper(peak: Levels, *, outside: int, capacity: int) -> Levels:
    """The margins of the formula's first models; nothing is given back where it does not fit."""
    fits = peak.device <= capacity
    return upper_levels(
        peak, freely=peak.reserved, outside=outside, capacity=capacity if fits else sys.maxsize
    )


class DryRun:
    """An estimator; close it, or use it as a context.

    Attributes:
        num_runs: cases that were run so far.
    """

    def __init__(
        self,
        *,
        time_limit_s: float = DRY_RUN_LIMIT_S,
        watch: Callable[[str | None], None] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start nothing yet: the first case does.

        Args:
            time_limit_s: seconds that one case may take.
            watch: called with what is run when a case starts, and with None when it has ended.
            command: the child's command line.
        """
        self.num_runs = 0
        self._time_limit_s = time_limit_s
        self._watch = watch or (lambda _: None)
        self._command = command
        self._child: Child | None = None
        self._known: dict[Step, DryRunEstimate] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child and all that it started."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __call__(self, step: Step) -> DryRunEstimate:
        """The estimate of one step; each step is run once.

        Raises:
            NotCoveredError: the dry run cannot run it.
            UserError: it took too long, or its process failed.
        """
        if step not in self._known:
            self._known[step] = self._ask(step, {})
            self.num_runs += 1
        return self._known[step]

    def count_parameters(self) -> tuple[int, int]:
        """Parameters of the model that was run first, and those of them that are trained."""
        first = next(iter(self._known.values()))
        return first.num_parameters, first.num_trainable_parameters

    def trace(self, step: Step, *, snapshot: Path | None = None) -> Timeline:
        """Live bytes over the step, and a snapshot for PyTorch's memory viewer.

        Args:
            step: the step.
            snapshot: the file to write; None: none.

        Raises:
            UserError: as for a call, or the file cannot be written.
        """
        more: dict[str, Any] = {"timeline": True}
        if snapshot is not None:
            more["snapshot"] = str(snapshot.absolute())
        found = self._ask(step, more).timeline
        assert found is not None
        return found

    def _ask(self, step: Step, more: Mapping[str, Any]) -> DryRunEstimate:
        if step.method.is_zero:
            raise NotCoveredError(
                key="method",
                value=step.method,
                allowed="DeepSpeed's engine is not part of the dry run; the formula covers it",
            )
        self._watch(f"{step.method}, micro batch {step.micro_batch}")
        try:
            text = self._exchange(json.dumps({**case_of(step), **more}), step)
        except BaseException:
            self.close()
            raise
        finally:
            self._watch(None)
        try:
            reply = json.loads(text)
            if "error" in reply:
                raise _refusal(reply["error"])
            return read_row(reply["row"], capacity_bytes=step.gpu.usable_bytes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise _failure(f"its process answered with what is no row: {text[:80]!r}") from error

    def _exchange(self, line: str, step: Step) -> str:
        try:
            if self._child is None:
                self._child = Child(self._command, WITHOUT_GPU)
            self._child.send(line)
            reply = self._child.receive(self._time_limit_s)
        except ChildEndedError as error:
            raise _failure(str(error)) from error
        if reply is None:
            raise UserError(
                key="dryrun.time_limit_s",
                value=f"{self._time_limit_s:g}",
                allowed=f"the dry run of {step.method} with micro batch {step.micro_batch} took "
                "longer and was ended; give it more, or estimator=formula",
            )
        return reply


def _refusal(error: Mapping[str, Any]) -> UserError:
    key, value, allowed = (str(error[name]) for name in ("key", "value", "allowed"))
    kind = UserError if key == "snapshot" else NotCoveredError
    return kind(key=key, value=value, allowed=allowed)


def _failure(reason: str) -> UserError:
    return UserError(key="estimator", value="dryrun", allowed=reason)


__all__ = ["COMMAND", "DryRun", "DryRunEstimate", "case_of", "read_row"]
