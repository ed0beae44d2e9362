"""A row or a snapshot explained by what an estimator says of the same job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from src.errors import UserError
from src.measure.attribution import attribute
from src.measure.case import Case, parse_case
from src.measure.events import Instant, Owner
from src.measure.recorded import Recorded
from src.plan.gap.causes import corrected, facts, facts_of_recording, outside_words, rest
from src.plan.gap.parts import parts_by_owner, parts_by_time
from src.plan.gap.result import Cause, Gap, InstantGap, Kind, LevelGap, PartGap
from src.plan.gap.settings import differences, is_same_model, moved
from src.plan.result import MethodReport, Report
from src.plan.search import Answer, Estimator
from src.record import LEVELS, Row
from src.spec import Request, Step

MOST_NAMED = 8
"""Rows that an error lists."""


def read_case(row: Row, file: str) -> Case:
    """The step that a row is of.

    Raises:
        UserError: it is of a form that is not known here.
    """
    try:
        return parse_case(row.case)
    except UserError as error:
        words = f"row {row.row_id} is of a case that is not known here ({error})"
        raise UserError(key="measured", value=file, allowed=words) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        words = f"row {row.row_id} is of a case that is not known here ({error})"
        raise UserError(key="measured", value=file, allowed=words) from error


def choose(rows: Sequence[Row], request: Request, file: str) -> Row:
    """The only row that is of the asked job; what was left open may be anything.

    Raises:
        UserError: there is none, or more than one; it lists them.
    """
    if len(rows) == 1:
        return rows[0]
    of_job = [row for row in rows if _is_of(read_case(row, file), request)]
    if len(of_job) == 1:
        return of_job[0]
    listed = of_job or list(rows)
    ids = ", ".join(f"{row.row_id} ({_title(row)})" for row in listed[:MOST_NAMED])
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    how_many = f"{len(of_job)} of its rows are" if of_job else f"none of its {len(rows)} rows is"
    allowed = f"{how_many} of this job; {file}:N or {file}:ID takes one: {ids}{more}"
    raise UserError(key="measured", value=file, allowed=allowed)


def _title(row: Row) -> str:
    case = row.case
    model = case.get("model", {})
    name = model.get("name", "model") if isinstance(model, Mapping) else "model"
    return f"{name} {case.get('method', 'single')} batch {case.get('micro_batch', 1)}"


def _is_of(case: Case, request: Request) -> bool:
    step, cluster = case.step, request.cluster
    is_open = request.micro_batch is None
    alike = (
        step.layout.num_gpus == cluster.num_gpus
        and step.gpu.sku == cluster.gpu.sku
        and (is_open or step.micro_batch == request.micro_batch)
        and (not request.methods or step.method in request.methods)
        and is_same_model(request.job.model, step.job.model)
    )
    if not alike:
        return False
    asked = Step(
        job=request.job,
        method=step.method,
        layout=step.layout,
        gpu=step.gpu,
        micro_batch=step.micro_batch,
    )
    return not [each for each in differences(asked, case) if each.alone is not None]


def explain_row(report: Report, estimator: Estimator, row: Row, file: str) -> Gap:
    """The gap to a row.

    Args:
        report: the answer.
        estimator: who gave it.
        row: the row.
        file: where it is from, as it was typed.

    Raises:
        UserError: the row's case is not known, or it has nothing to compare.
    """
    case = read_case(row, file)
    if not row.peak_bytes:
        allowed = f"row {row.row_id} has no bytes (outcome {row.outcome})"
        raise UserError(key="measured", value=file, allowed=allowed)
    asked = _asked(report, case.step)
    found = differences(asked, case)
    estimate = estimator(asked)
    settings = moved(found, estimator, estimate.peak_bytes)
    settled = estimate if not found else _answer(estimator, case.step)
    known = settled or estimate
    instant = _instant(known, row.peak_instant)
    column = _column(known, instant)
    parts = _parts(row, column, case.step, instant)
    return Gap(
        file=file,
        kind=Kind.ROW,
        id=row.row_id,
        source=row.source.value,
        outcome=row.outcome.value,
        method=asked.method,
        layout=asked.layout,
        micro_batch=asked.micro_batch,
        levels=_levels(estimate, settled, row.peak_bytes),
        settings=settings,
        instants=_instants(known, row),
        instant=instant,
        parts=tuple(parts),
        unattributed_bytes=_unattributed(parts, row),
        causes=(
            *rest(known.peak_bytes, row.peak_bytes, outside=outside_words(row)),
            *corrected(known.peak_bytes.allocated, sum(column.values())),
            *_unsettled(settled),
            *facts(row),
        ),
        versions=row.versions,
    )


def _unsettled(settled: Answer | None) -> Iterator[Cause]:
    if settled is None:
        words = "the estimator does not cover the row's: everything here is of the asked ones"
        yield Cause(kind="settings", gap_bytes=None, words=words)


def _answer(estimator: Estimator, step: Step) -> Answer | None:
    try:
        return estimator(step)
    except UserError:
        return None


def _asked(report: Report, measured: Step) -> Step:
    """What was asked; of what was left open, what was measured, where that is among it."""
    request = report.request
    row = _like(report, measured)
    return Step(
        job=request.job,
        method=row.method,
        layout=row.layout,
        gpu=request.cluster.gpu,
        micro_batch=request.micro_batch or measured.micro_batch,
    )


def _like(report: Report, measured: Step) -> MethodReport:
    """The report's row of the measured method and layout, else of the method, else the first."""
    same = [row for row in report.methods if row.method is measured.method]
    exact = [row for row in same if row.layout == measured.layout]
    return next(iter([*exact, *same, *report.methods]))


def _levels(
    estimate: Answer, settled: Answer | None, measured: Mapping[str, int | None]
) -> tuple[LevelGap, ...]:
    return tuple(
        LevelGap(
            level=level,
            estimate_bytes=getattr(estimate.peak_bytes, level),
            settled_bytes=None if settled is None else getattr(settled.peak_bytes, level),
            measured_bytes=measured.get(level),
        )
        for level in LEVELS
    )


def _column(estimate: Answer, instant: str) -> dict[str, int]:
    return {
        str(term): int(size)
        for name, column in estimate.ledger.items()
        if str(name) == instant
        for term, size in column.items()
    }


def _instant(estimate: Answer, measured: str | None) -> str:
    """The measured peak's instant if the estimate has it, else the estimate's own."""
    names = [str(name) for name in estimate.ledger]
    return measured if measured in names else str(estimate.peak_instant)


def _named(by_owner: Mapping[Owner, int]) -> dict[str, int]:
    return {owner.value: size for owner, size in by_owner.items()}


def _instants(estimate: Answer, row: Row) -> tuple[InstantGap, ...]:
    """Of both sides, in the order of the step; empty where the row has none."""
    names = [str(name) for name in estimate.ledger] if row.instants else []
    order = [instant.value for instant in Instant]
    every = sorted(
        {*names, *row.instants}, key=lambda name: order.index(name) if name in order else -1
    )
    return tuple(
        InstantGap(
            instant=name,
            estimate_bytes=sum(_column(estimate, name).values()) if name in names else None,
            measured_bytes=row.instants.get(name, {}).get("allocated"),
        )
        for name in every
    )


def _parts(row: Row, column: dict[str, int], step: Step, instant: str) -> list[PartGap]:
    if instant in row.ledger:
        return parts_by_owner(column, row.ledger[instant])
    kept = row.numbers.get("after_step_bytes")
    return parts_by_time(
        column,
        method=step.method,
        kept_bytes=None if kept is None else int(kept),
        peak_bytes=_peak(row, instant),
    )


def _peak(row: Row, instant: str) -> int | None:
    return row.instants.get(instant, {}).get("allocated", row.peak_bytes.get("allocated"))


def _unattributed(parts: list[PartGap], row: Row) -> int | None:
    """What of the allocated peak is in no part: all of it where no part was seen."""
    peak = row.peak_bytes.get("allocated")
    seen = sum(part.measured_bytes or 0 for part in parts)
    return None if peak is None else peak - seen


def explain_recording(report: Report, estimator: Estimator, found: Recorded, file: str) -> Gap:
    """The gap to a snapshot, which does not say its settings: it is taken to be of what is asked.

    Args:
        report: the answer; its recommended row is compared, else its first.
        estimator: who gave it.
        found: the snapshot's peak.
        file: where it is from, as it was typed.
    """
    row = report.methods[0]
    step = Step(
        job=report.request.job,
        method=row.method,
        layout=row.layout,
        gpu=report.request.cluster.gpu,
        micro_batch=row.micro_batch,
    )
    estimate = estimator(step)
    instant = str(estimate.peak_instant)
    held = attribute(found.blocks, step)
    measured = {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "device": None,
    }
    told = ", ".join(
        f"{100 * size / max(found.allocated_bytes, 1):.0f} % by {what}"
        for what, size in sorted(held.by_evidence.items(), key=lambda item: -item[1])
    )
    return Gap(
        file=file,
        kind=Kind.SNAPSHOT,
        id=str(found.device),
        source="recorded",
        outcome="oom" if found.num_ooms else "ok",
        method=step.method,
        layout=step.layout,
        micro_batch=step.micro_batch,
        levels=_levels(estimate, estimate, measured),
        settings=(),
        instants=(),
        instant=instant,
        parts=tuple(parts_by_owner(_column(estimate, instant), _named(held.num_bytes))),
        unattributed_bytes=held.unattributed_bytes,
        causes=(
            *rest(estimate.peak_bytes, measured),
            *facts_of_recording(found),
            Cause(kind="owners", gap_bytes=None, words=f"whose bytes: {told or 'none'}"),
            *_left_open(report.request),
        ),
        versions={},
    )


def _left_open(request: Request) -> Iterator[Cause]:
    """A snapshot does not say what it is of: what was not asked either is a guess."""
    if request.micro_batch is None:
        words = "micro_batch is not given: the estimate is of the largest that fits"
        yield Cause(kind="settings", gap_bytes=None, words=words)
