"""Who answers a question, for as long as it takes: a formula, or the dry run in its child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from src.architecture import supported_model_types
from src.config.calibration import load_calibrated, with_calibration
from src.config.gpu import every_gpu
from src.config.request import Question
from src.errors import NotCoveredError, UserError
from src.memory import estimate_step, llmem_step
from src.plan import compare
from src.plan.advice import advise
from src.plan.result import MethodReport, Report
from src.plan.search import Estimator
from src.plan.solve import compare_solved
from src.spec import EstimatorKind, Request, Step, Unknown

if TYPE_CHECKING:
    from src.measure.client import DryRun
    from src.measure.timeline import Timeline


_BY_FORMULA = (EstimatorKind.FORMULA, EstimatorKind.CALIBRATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A report, and what its estimator can still be asked.

    Attributes:
        report: with the warnings of both the question and the answer.
        dry_run: the dry run that answered; None where the formula did.
    """

    report: Report
    dry_run: DryRun | None = None

    def timeline(self) -> Timeline | None:
        """Live bytes over the step of the first row, if one method was asked for a dry run."""
        if self.dry_run is None or len({row.method for row in self.report.methods}) != 1:
            return None
        return self.dry_run.trace(self._first())

    def write_snapshot(self, path: Path) -> None:
        """Write the first row's snapshot for PyTorch's memory viewer.

        Raises:
            UserError: it cannot be written.
        """
        assert self.dry_run is not None
        self.dry_run.trace(self._first(), snapshot=path)

    def _first(self) -> Step:
        return _step(self.report.request, self.report.methods[0])


def _step(request: Request, row: MethodReport) -> Step:
    return Step(
        job=request.job,
        method=row.method,
        layout=row.layout,
        gpu=request.cluster.gpu,
        micro_batch=row.micro_batch,
    )


@contextmanager
def answering(
    question: Question, *, watch: Callable[[str | None], None] | None = None
) -> Iterator[Answer]:
    """The answer; the dry run's process lives as long as the context.

    Args:
        question: what is asked.
        watch: told which dry run starts, and None when it has ended.

    Raises:
        UserError: something that was asked is impossible.
    """
    request = question.request
    is_known = request.job.model.model_type in supported_model_types()
    reason = f"the formula does not know {request.job.model.model_type}"
    if request.estimator in _BY_FORMULA or (request.estimator is EstimatorKind.AUTO and is_known):
        try:
            report, estimator = _by_formula(request, question.champion)
        except NotCoveredError as error:
            if request.estimator is not EstimatorKind.AUTO:
                raise
            reason = str(error)
        else:
            yield Answer(report=_finished(report, question, estimator))
            return
    if request.estimator is EstimatorKind.LLMEM:
        report = _compare(request, llmem_step, EstimatorKind.LLMEM)
        yield Answer(report=_finished(report, question, llmem_step))
        return
    if request.solve is not None:
        allowed = f"only with estimator=formula, calibrated or llmem: {reason}"
        raise UserError(key="solve", value=request.solve, allowed=allowed)
    from src.measure.client import DryRun

    with DryRun(time_limit_s=question.dry_run_limit_s, watch=watch) as dry_run:
        report = _by_dry_run(request, dry_run, reason)
        yield Answer(report=_finished(report, question, dry_run), dry_run=dry_run)


def _compare(request: Request, estimator: Estimator, kind: EstimatorKind) -> Report:
    """The report; with a field left open, at the value that was found for it."""
    if request.solve is None:
        report = compare(request, estimator, kind=kind)
        if kind is EstimatorKind.LLMEM:
            return report
        return replace(report, advice=advise(request, estimator))
    gpus = every_gpu() if request.solve is Unknown.GPU else [request.cluster.gpu]
    return compare_solved(request, estimator, gpus, kind=kind)


def _by_formula(request: Request, champion: Path) -> tuple[Report, Estimator]:
    """The formula's report, corrected unless the formula alone was asked for, and who gave it."""
    if request.estimator is EstimatorKind.FORMULA:
        return _compare(request, estimate_step, EstimatorKind.FORMULA), estimate_step
    calibrated, lack = load_calibrated(champion)
    if calibrated is None:
        report = _compare(request, estimate_step, EstimatorKind.FORMULA)
        return _with_warnings(report, (lack,)), estimate_step
    report = _compare(request, calibrated, EstimatorKind.CALIBRATED)
    return with_calibration(report, calibrated), calibrated


def _finished(report: Report, question: Question, estimator: Estimator) -> Report:
    """The report with the question's warnings, and the gap to what was measured."""
    report = _with_warnings(report, question.warnings)
    if question.measured is None:
        return report
    return replace(report, measured=question.measured.explain(report, estimator))


def _with_warnings(report: Report, warnings: tuple[str, ...]) -> Report:
    return replace(report, warnings=(*warnings, *report.warnings))


def _by_dry_run(request: Request, dry_run: DryRun, reason: str) -> Report:
    """The dry run's report; `reason` says why `auto` came to it."""
    try:
        report = compare(
            request,
            dry_run,
            kind=EstimatorKind.DRYRUN,
            count_parameters=dry_run.count_parameters,
        )
    except UserError as error:
        if request.estimator is EstimatorKind.AUTO and error.key == "model_type":
            return compare(request)  # transformers does not know it either: the formula's error
        raise
    num_runs = dry_run.num_runs
    warnings = [f"{num_runs} dry run{'s were' if num_runs > 1 else ' was'} made"]
    if request.estimator is EstimatorKind.AUTO:
        warnings.insert(0, f"{reason}: the dry run answers")
    return _with_warnings(report, tuple(warnings))
