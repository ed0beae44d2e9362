"""Every method of a request, estimated, ranked, and one of them recommended with its reason."""

from __future__ import annotations

from src.architecture import Decoder, describe
from src.errors import UserError
from src.memory import count_model, estimate_step
from src.plan.changes import changes_that_fit
from src.plan.checks import check
from src.plan.layouts import Candidate, candidates
from src.plan.result import MethodReport, ModelSummary, Recommendation, Report
from src.plan.search import Estimator, largest_micro_batch, verdict, with_micro_batch
from src.plan.throughput import tokens_per_second
from src.spec import EstimatorKind, Method, Request, Step, Verdict
from src.units import format_gib

UNCALIBRATED = (
    "reserved and device are first models, not calibrated: upper bounds are the estimate plus a "
    "stated margin (allocated +5 %, context and NCCL +25 %), tokens/s only ranks"
)
SAME_SPEED = 0.02
"""Throughputs closer than this are not told apart."""

SIMPLEST_FIRST = (
    Method.SINGLE,
    Method.DDP,
    Method.FSDP_GRAD,
    Method.FSDP,
    Method.ZERO1,
    Method.ZERO2,
    Method.ZERO3,
    Method.TP,
    Method.DDP_TP,
    Method.FSDP_TP,
)
"""Which method to take of equally fast ones: PyTorch's own before an engine's, fewer parts."""

ZERO_NOTE = "read off DeepSpeed's code; not checked against a run"


def compare(request: Request, estimator: Estimator = estimate_step) -> Report:
    """The answer to a request.

    Raises:
        UserError: the config, a method or a degree is impossible.
    """
    decoder = describe(request.job.model)
    warnings = check(request, decoder)
    found = [
        _report(request, decoder, candidate, estimator)
        for candidate in candidates(request, decoder)
    ]
    found.sort(key=_rank)
    recommended = _recommend(found)
    if recommended is not None:
        found.sort(key=lambda report: not _is(report, recommended))
    if recommended is None:
        warnings = (*warnings, _nothing_fits(request, found, estimator))
    return Report(
        request=request,
        model=_summary(request, decoder),
        gpu=request.cluster.gpu,
        estimator=EstimatorKind.FORMULA,
        methods=tuple(found),
        recommended=recommended,
        calibration=None,
        warnings=(*warnings, UNCALIBRATED),
    )


def _is(report: MethodReport, recommended: Recommendation) -> bool:
    """Whether a row is the recommended one."""
    return (report.method, report.layout) == (recommended.method, recommended.layout)


def _summary(request: Request, decoder: Decoder) -> ModelSummary:
    model = request.job.model
    counts = count_model(decoder, finetune=request.job.finetune).all
    return ModelSummary(
        name=model.name,
        hf_id=model.hf_id,
        model_type=model.model_type,
        num_parameters=decoder.num_parameters,
        num_trainable_parameters=round(counts.trained),
    )


def _report(
    request: Request, decoder: Decoder, candidate: Candidate, estimator: Estimator
) -> MethodReport:
    """One row: at the micro batch asked for, else at the largest that fits, else at 1."""
    step = Step(
        job=request.job,
        method=candidate.method,
        layout=candidate.layout,
        gpu=request.cluster.gpu,
        micro_batch=1,
    )
    largest = largest_micro_batch(step, estimator)
    step = with_micro_batch(step, request.micro_batch or max(largest, 1))
    estimate = estimator(step)
    judged = verdict(estimate, step.gpu)
    speed = tokens_per_second(step, request.cluster, decoder)
    notes = (*estimate.notes, ZERO_NOTE) if step.method.is_zero else estimate.notes
    return MethodReport(
        method=step.method,
        layout=step.layout,
        micro_batch=step.micro_batch,
        peak_bytes=estimate.peak_bytes,
        upper_bytes=estimate.upper_bytes,
        peak_instant=estimate.peak_instant.value,
        ledger={
            instant.value: {term.value: cell for term, cell in cells.items()}
            for instant, cells in estimate.ledger.items()
        },
        max_micro_batch=largest,
        tokens_per_second=None if judged is Verdict.OOM else speed,
        verdict=judged,
        notes=notes,
    )


def _rank(report: MethodReport) -> tuple[int, float, int]:
    """What fits before what is tight before what does not; faster first; then less memory."""
    order = {Verdict.FITS: 0, Verdict.TIGHT: 1, Verdict.OOM: 2}[report.verdict]
    return order, -(report.tokens_per_second or 0.0), report.peak_bytes.device


def _recommend(found: list[MethodReport]) -> Recommendation | None:
    """The simplest of the rows that fit and are as good as fastest, and how it stands."""
    fitting = [report for report in found if report.verdict is Verdict.FITS]
    if not fitting:
        return None
    best = min(_as_fast(fitting), key=lambda report: SIMPLEST_FIRST.index(report.method))
    return Recommendation(
        method=best.method,
        layout=best.layout,
        micro_batch=best.micro_batch,
        reason=_reason(best, fitting, found),
    )


def _reason(best: MethodReport, fitting: list[MethodReport], found: list[MethodReport]) -> str:
    if len(found) == 1:
        return f"fits with {format_gib(best.upper_bytes.device)} at most"
    rest = [report for report in found if report.verdict is not Verdict.FITS]
    others = ", ".join(dict.fromkeys(report.method.value for report in rest))
    unfit = f"; {others} not sure to fit" if rest else ""
    if len(fitting) == 1:
        return f"the only one of {len(found)} that fits{unfit}"
    equals = [report for report in _as_fast(fitting) if report is not best]
    if equals:
        names = ", ".join(dict.fromkeys(report.method.value for report in equals))
        return (
            f"simplest of the {len(equals) + 1} within {SAME_SPEED:.0%} of the fastest "
            f"(also {names}){unfit}"
        )
    speed, other = best.tokens_per_second or 0.0, fitting[1].tokens_per_second or 1.0
    lead = f"{speed / other - 1:.0%} ahead of {fitting[1].method.value}"
    return f"fastest of the {len(fitting)} that fit, {lead}{unfit}"


def _as_fast(fitting: list[MethodReport]) -> list[MethodReport]:
    """Rows whose throughput is within `SAME_SPEED` of the best: the model cannot tell."""
    best = max(report.tokens_per_second or 0.0 for report in fitting)
    return [
        report for report in fitting if (report.tokens_per_second or 0.0) >= best * (1 - SAME_SPEED)
    ]


def _nothing_fits(request: Request, found: list[MethodReport], estimator: Estimator) -> str:
    """How much is missing, and which single changes would make something fit."""
    gpu = request.cluster.gpu
    least = min(found, key=lambda report: report.upper_bytes.device)
    missing = least.upper_bytes.device - gpu.usable_bytes
    changes = changes_that_fit(request, lambda changed: _something_fits(changed, estimator))
    words = f"any one of these would: {', '.join(changes)}" if changes else "no single change would"
    needed = format_gib(least.upper_bytes.device)
    return (
        f"nothing fits: the least, {least.method.value} at micro_batch={least.micro_batch}, needs "
        f"up to {needed}, {format_gib(missing)} more than {gpu.sku} has; {words}"
    )


def _something_fits(request: Request, estimator: Estimator) -> bool:
    """Whether any method of a changed request fits; a request that is impossible does not."""
    decoder = describe(request.job.model)
    try:
        check(request, decoder)
        mine = candidates(request, decoder)
        return any(
            verdict(
                estimator(
                    Step(
                        job=request.job,
                        method=candidate.method,
                        layout=candidate.layout,
                        gpu=request.cluster.gpu,
                        micro_batch=request.micro_batch or 1,
                    )
                ),
                request.cluster.gpu,
            )
            is Verdict.FITS
            for candidate in mine
        )
    except UserError:
        return False
