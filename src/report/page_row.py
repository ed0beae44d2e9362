"""The page of a row: the formula's report of its case, and the gap to what was measured."""

from __future__ import annotations

from dataclasses import replace

from src.errors import UserError
from src.measure.case import parse_case
from src.memory import estimate_step
from src.plan.compare import compare
from src.plan.gap.explain import explain_row
from src.plan.result import Report
from src.record import Row
from src.report.page import render_page
from src.spec import Cluster, Request, Step


def draw_page(row: Row) -> str | None:
    """The page as HTML; None where the formula does not cover the row's case."""
    try:
        report = compare(_request(parse_case(row.case).step))
    except UserError:
        return None
    return render_page(_explained(report, row))


def _explained(report: Report, row: Row) -> Report:
    try:
        gap = explain_row(report, estimate_step, row, row.provenance.campaign)
    except UserError:  # nothing was seen of it
        return report
    return replace(report, measured=gap)


def _request(step: Step) -> Request:
    """The question whose answer is about this step alone."""
    num_gpus, usual = step.layout.num_gpus, step.gpu.gpus_per_node
    nodes_are_full = num_gpus % usual == 0
    return Request(
        job=step.job,
        cluster=Cluster(
            gpu=step.gpu,
            num_gpus=num_gpus,
            gpus_per_node=usual if nodes_are_full else num_gpus,
        ),
        methods=(step.method,),
        tp=step.layout.tp if step.method.has_tensor_parallel else None,
        micro_batch=step.micro_batch,
    )
