"""Which of the rows that fit is recommended: what is fastest here, or what LLMem's rule chooses.

LLMem (arXiv 2404.10933) raises the batch size of each method until its peak exceeds the card and
scores the largest that did not: conventional data parallelism (CDP) first, then ZeRO-3 (ADP), then
tensor parallelism (TP), then both (DP+TP) where scores are equal.

Letters: b largest micro batch that fits, N GPUs, dp data-parallel replicas.
"""

from __future__ import annotations

from enum import StrEnum

from src.plan.result import MethodReport, Recommendation
from src.spec import Method, Policy, Verdict
from src.units import format_gib

SAME_SPEED = 0.02
"""Throughputs closer than this are not told apart."""

SIMPLEST_FIRST = (
    Method.SINGLE,
    Method.DDP,
    Method.FSDP,
    Method.FSDP_GRAD,
    Method.HSDP,
    Method.ZERO1,
    Method.ZERO2,
    Method.ZERO3,
    Method.TP,
    Method.DDP_TP,
    Method.FSDP_TP,
)
"""Which method to take of equally fast ones: PyTorch's own before an engine's, fewer parts."""


class LlmemMethod(StrEnum):
    """LLMem's methods, in the order in which it settles equal scores."""

    CDP = "CDP"
    ADP = "ADP"
    TP = "TP"
    DP_TP = "DP+TP"


LLMEM_METHODS = {
    Method.SINGLE: LlmemMethod.CDP,
    Method.DDP: LlmemMethod.CDP,
    Method.FSDP: LlmemMethod.ADP,
    Method.ZERO3: LlmemMethod.ADP,
    Method.TP: LlmemMethod.TP,
    Method.DDP_TP: LlmemMethod.DP_TP,
    Method.FSDP_TP: LlmemMethod.DP_TP,
}
"""What LLMem would call a method; what shards states but not weights has no place in its rule."""

CDP_WEIGHT = 1.5
"""How many times a sequence counts under CDP, which gathers no weights (LLMem's constant)."""


def recommend(found: list[MethodReport], policy: Policy) -> Recommendation | None:
    """The row to run; None where nothing fits, or nothing that the policy knows.

    Args:
        found: every row, the faster of those that fit first.
        policy: how to choose.
    """
    return _by_llmem(found) if policy is Policy.LLMEM else _fastest(found)


def llmem_score(report: MethodReport) -> float:
    """LLMem's score of a row: `1.5*b*N` CDP, `b*N` ADP, `b` TP, `b*dp` DP+TP; 0 for any other."""
    largest, layout = report.max_micro_batch, report.layout
    match LLMEM_METHODS.get(report.method):
        case LlmemMethod.CDP:
            return CDP_WEIGHT * largest * layout.num_gpus
        case LlmemMethod.ADP:
            return float(largest * layout.num_gpus)
        case LlmemMethod.TP:
            return float(largest)
        case LlmemMethod.DP_TP:
            return float(largest * layout.dp)
        case None:
            return 0.0


def _by_llmem(found: list[MethodReport]) -> Recommendation | None:
    """The highest score of the rows that fit; LLMem's order, then the simplest, among equals."""
    order = list(LlmemMethod)
    scored = sorted(
        (report for report in found if report.verdict is Verdict.FITS and llmem_score(report)),
        key=lambda report: (
            -llmem_score(report),
            order.index(LLMEM_METHODS[report.method]),
            SIMPLEST_FIRST.index(report.method),
        ),
    )
    if not scored:
        return None
    best = scored[0]
    others = [f"{report.method.value} {llmem_score(report):g}" for report in scored[1:]]
    rest = f", then {', '.join(others)}" if others else ", the only one above 0"
    if others and llmem_score(scored[1]) == llmem_score(best):
        rest += " (equal scores go by LLMem's order)"
    return Recommendation(
        method=best.method,
        layout=best.layout,
        micro_batch=best.micro_batch,
        reason=f"LLMem's rule: {LLMEM_METHODS[best.method].value} scores "
        f"{llmem_score(best):g}{rest}",
    )


def without_score(found: list[MethodReport]) -> str:
    """What LLMem's rule says where every score is 0, and which rows fit that it does not know."""
    fitting = dict.fromkeys(row.method.value for row in found if row.verdict is Verdict.FITS)
    rest = f"; {', '.join(fitting)} would fit, which it does not know" if fitting else ""
    return f"policy=llmem: every score is 0, where LLMem falls back on CPU offload{rest}"


def _fastest(found: list[MethodReport]) -> Recommendation | None:
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
    if best.tokens_per_second is None:
        return f"simplest of the {len(fitting)} that fit; how fast they are is not known{unfit}"
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
