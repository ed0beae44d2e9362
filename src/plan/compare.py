"""Every method of a request, estimated, ranked, and one of them recommended with its reason."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture import Decoder, describe, supported_model_types
from src.errors import NotCoveredError
from src.memory import count_model, estimate_step
from src.plan.checks import check
from src.plan.expected import expected_bytes, without_padding
from src.plan.layouts import Candidate, candidates
from src.plan.pace import estimators_pace
from src.plan.policy import recommend, without_score
from src.plan.result import MethodReport, ModelSummary, Recommendation, Report
from src.plan.search import Estimator, largest_micro_batch, verdict, with_micro_batch
from src.plan.sparing import Largest, largest_sparingly
from src.plan.throughput import Pace, tokens_per_second
from src.spec import Cluster, EstimatorKind, Policy, Request, Step, Verdict
from src.units import format_gib

UNCALIBRATED = (
    "reserved and device are first models, not calibrated: upper bounds are the estimate plus a "
    "stated margin (allocated +5 %, fragmentation +5 %, context and NCCL +25 %); tokens/s is for "
    "ranking only"
)
SIMULATED = (
    "the dry run is a simulation, not a measurement: upper bounds are the estimate plus a stated "
    "margin (allocated and reserved +5 %, context and NCCL +25 %), tokens/s only ranks"
)
BY_LLMEM = (
    "LLMem's figure is the device level, its terms added up as if all peaked at once: allocated "
    "and reserved are that without m_base, and its upper bound is the figure itself; tokens/s is "
    "not LLMem's and speaks of PyTorch's methods"
)
CALIBRATED = (
    "tokens/s is for ranking only, and so is what is outside the range of the calibration: there "
    "bounds are at least the formula's stated margins"
)
CAVEATS = {
    EstimatorKind.FORMULA: UNCALIBRATED,
    EstimatorKind.CALIBRATED: CALIBRATED,
    EstimatorKind.DRYRUN: SIMULATED,
    EstimatorKind.LLMEM: BY_LLMEM,
}
"""What each estimator's numbers are not."""


def compare(
    request: Request,
    estimator: Estimator = estimate_step,
    *,
    kind: EstimatorKind = EstimatorKind.FORMULA,
    count_parameters: Callable[[], tuple[int, int]] | None = None,
) -> Report:
    """The answer to a request.

    Args:
        request: the request.
        estimator: who answers.
        kind: its name. The dry run is asked sparingly and knows models that the formula does not;
            any estimator but the formula may refuse single methods of all.
        count_parameters: the model's parameters and those that are trained, of a model that the
            formula does not know; called once the estimator has answered.

    Raises:
        UserError: the config, a method or a degree is impossible.
    """
    is_known = request.job.model.model_type in supported_model_types()
    is_dry = kind is EstimatorKind.DRYRUN
    decoder = describe(request.job.model) if is_known or not is_dry else None
    warnings = () if decoder is None else check(request, decoder)
    found, left_out = _rows(request, decoder, estimator, is_dry=is_dry)
    warnings = (*warnings, *left_out)
    found.sort(key=_rank)
    recommended = recommend(found, request.policy)
    if recommended is not None:
        found.sort(key=lambda report: not _is(report, recommended))
    if recommended is None and request.policy is Policy.LLMEM:
        warnings = (*warnings, without_score(found))
    if not any(row.verdict is Verdict.FITS for row in found):
        warnings = (*warnings, _nothing_fits(request, found))
    return Report(
        request=request,
        model=_summary(request, decoder, count_parameters),
        gpu=request.cluster.gpu,
        estimator=kind,
        methods=tuple(found),
        recommended=recommended,
        calibration=None,
        warnings=(*warnings, _caveat(kind, estimators_pace(estimator))),
    )


def _caveat(kind: EstimatorKind, pace: Pace) -> str:
    """What the numbers are not; where steps were timed, tokens/s is more than a ranking."""
    if not pace.num_rows:
        return CAVEATS[kind]
    timed = f"tokens/s follows the times of {pace.num_rows} measured steps"
    return CAVEATS[kind].replace("tokens/s is for ranking only", timed)


def _rows(
    request: Request, decoder: Decoder | None, estimator: Estimator, *, is_dry: bool
) -> tuple[list[MethodReport], list[str]]:
    """A row for each candidate, and a warning for each that was left out."""
    found: list[MethodReport] = []
    refused: dict[str, NotCoveredError] = {}
    for candidate in candidates(request, decoder):
        try:
            found.append(_report(request, decoder, candidate, estimator, is_dry=is_dry))
        except NotCoveredError as error:
            if request.methods:
                raise
            refused.setdefault(candidate.method.value, error)
    if not found:
        raise next(iter(refused.values()))
    reasons: dict[str, list[str]] = {}
    for method, refusal in refused.items():
        words = refusal.allowed if refusal.key == "method" else str(refusal)
        reasons.setdefault(words, []).append(method)
    return found, [f"{', '.join(methods)} left out: {words}" for words, methods in reasons.items()]


def _is(report: MethodReport, recommended: Recommendation) -> bool:
    """Whether a row is the recommended one."""
    return (report.method, report.layout) == (recommended.method, recommended.layout)


def _summary(
    request: Request,
    decoder: Decoder | None,
    count_parameters: Callable[[], tuple[int, int]] | None,
) -> ModelSummary:
    model = request.job.model
    if decoder is None:
        assert count_parameters is not None
        own, trained = count_parameters()
    else:
        own = decoder.num_parameters
        trained = round(count_model(decoder, finetune=request.job.finetune).all.trained)
    return ModelSummary(
        name=model.name,
        hf_id=model.hf_id,
        model_type=model.model_type,
        num_parameters=own,
        num_trainable_parameters=trained,
    )


def _report(
    request: Request,
    decoder: Decoder | None,
    candidate: Candidate,
    estimator: Estimator,
    *,
    is_dry: bool,
) -> MethodReport:
    """One row: at the micro batch asked for, else at the largest that fits, else at 1."""
    step = Step(
        job=request.job,
        method=candidate.method,
        layout=candidate.layout,
        gpu=request.cluster.gpu,
        micro_batch=request.micro_batch or 1,
    )
    if is_dry:
        guide = None if decoder is None else estimate_step
        largest = largest_sparingly(step, estimator, guide, asked=request.micro_batch)
    else:
        found = largest_micro_batch(step, estimator)
        largest = Largest(micro_batch=found, unfit=found + 1)
    step = with_micro_batch(step, request.micro_batch or max(largest.micro_batch, 1))
    estimate = estimator(step)
    judged = verdict(estimate, step.gpu)
    notes = (*estimate.notes, *_host_note(estimate.host_bytes, request.cluster))
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
        max_micro_batch=largest.micro_batch,
        tokens_per_second=None
        if judged is Verdict.OOM
        else _speed(step, request, decoder, estimators_pace(estimator)),
        verdict=judged,
        expected_bytes=None
        if request.lengths is None or is_dry
        else expected_bytes(step, request.lengths, estimator),
        host_bytes=estimate.host_bytes,
        notes=notes if largest.is_exact else (*notes, _bracket(largest)),
    )


def _speed(step: Step, request: Request, decoder: Decoder | None, pace: Pace) -> float | None:
    """Tokens per second, padding not counted; None for a model that the formula does not know."""
    if decoder is None:
        return None
    if request.lengths is None:
        return tokens_per_second(step, request.cluster, decoder, pace)
    mean, share = without_padding(step, request.lengths)
    return tokens_per_second(mean, request.cluster, decoder, pace) * share


def _host_note(host_bytes: int | None, cluster: Cluster) -> tuple[str, ...]:
    """How much host memory a GPU and a node need, where anything is offloaded."""
    if not host_bytes:
        return ()
    node = format_gib(host_bytes * cluster.node_size)
    return (f"host memory: {format_gib(host_bytes)} per GPU, {node} per node",)


def _bracket(largest: Largest) -> str:
    """Where the largest micro batch lies, as far as a search that stopped early knows."""
    unfit = "" if largest.unfit is None else f", {largest.unfit} is not sure to"
    return f"max batch: {largest.micro_batch} fits{unfit}; what is between was not tried"


def _rank(report: MethodReport) -> tuple[int, float, int]:
    """What fits before what is tight before what does not; faster first; then less memory."""
    order = {Verdict.FITS: 0, Verdict.TIGHT: 1, Verdict.OOM: 2}[report.verdict]
    return order, -(report.tokens_per_second or 0.0), report.peak_bytes.device


def _nothing_fits(request: Request, found: list[MethodReport]) -> str:
    """How much is missing."""
    gpu = request.cluster.gpu
    least = min(found, key=lambda report: report.upper_bytes.device)
    missing = least.upper_bytes.device - gpu.usable_bytes
    needed = format_gib(least.upper_bytes.device)
    return (
        f"nothing fits: the least, {least.method.value} at micro_batch={least.micro_batch}, needs "
        f"up to {needed}, {format_gib(missing)} more than {gpu.sku} has"
    )
