"""`docs/llmem.md`: LLMem's formulas beside its own figures and beside ours, as tables.

    python -m tests.llmem_table

writes them between the page's marks. What LLMem published (IJCAI 2024, arXiv 2404.10933) was taken
on V100s of 16 GB with sequences of 512 tokens; at which batch is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from src.memory import estimate_step, llmem_step
from src.plan import compare, largest_micro_batch
from src.plan.policy import llmem_score
from src.plan.result import Report
from src.plan.search import Estimator
from src.spec import (
    Cluster,
    EstimatorKind,
    Job,
    Layout,
    Method,
    Policy,
    Precision,
    Request,
    Step,
    Verdict,
)
from src.units import GIB, MIB
from tests.jobs import gpu, zoo_model

PAGE = Path(__file__).parents[1] / "docs" / "llmem.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
CARD = gpu("v100-16gb")
BOARD_MIB = 16384
"""What NVML gives as the total of the card; CUDA gives out less, the driver keeps the rest."""

DRIVER_MIB = round(BOARD_MIB - CARD.usable_bytes / MIB)

SINGLE = {
    "opt-125m": (16314, 16378),
    "opt-350m": (16004, 16264),
    "bloom-560m": (16578, 16324),
    "codegen-350m": (16236, 16100),
}
"""LLMem's estimate and its measured peak on one V100, MiB."""

LAYOUTS = {
    "ddp": (Method.DDP, Layout(dp=4)),
    "fsdp": (Method.FSDP, Layout(dp=4, shard=4)),
    "fsdp+tp": (Method.FSDP_TP, Layout(dp=2, tp=2, shard=2)),
    "tp": (Method.TP, Layout(tp=4)),
}
MEASURED = ("fsdp", "fsdp+tp", "tp")
"""LLMem's 4DP, 2DP+2TP and 4TP: its data-parallel runs are Gemini's, which shards."""

SECONDS: dict[str, tuple[int | None, int | None, int | None]] = {
    "opt-1.3b": (688, 1616, 2186),
    "opt-2.7b": (None, 8174, 6038),
    "bloom-1b1": (680, 1724, 2631),
    "bloom-3b": (None, None, 14495),
    "biogpt-large": (1022, 3315, 4773),
    "codegen-2b": (None, 6314, 6244),
    "gpt_bigcode-santacoder": (651, 1292, 1652),
    "gpt-neo-1.3b": (768, 1686, 2372),
    "llama-7b": (None, None, None),
}
"""Measured seconds of the same fine-tuning on four V100s; None: out of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One GPU: the batch at which our `m_base` brings LLMem's formulas nearest to its figure.

    Attributes:
        batch: that micro batch.
        ours: the estimate there, MiB, with what the driver keeps.
        per_sequence: MiB that one more sequence takes.
    """

    batch: int
    ours: float
    per_sequence: float


def step_of(name: str, method: Method, layout: Layout, *, micro_batch: int = 1) -> Step:
    """A step as LLMem ran it."""
    job = Job(model=zoo_model(name), precision=Precision.FP16_MIXED)
    return Step(job=job, method=method, layout=layout, gpu=CARD, micro_batch=micro_batch)


def device_mib(step: Step) -> float:
    """LLMem's formulas as LLMem states them: what NVML shows, with what the driver keeps."""
    return llmem_step(step).peak_bytes.device / MIB + DRIVER_MIB


def nearest_fit(name: str, figure: int) -> Fit:
    """Where LLMem's figure lies among the batches."""

    def at(batch: int) -> float:
        return device_mib(step_of(name, Method.SINGLE, Layout(), micro_batch=batch))

    batch = min(range(1, 200), key=lambda batch: abs(at(batch) - figure))
    return Fit(batch=batch, ours=at(batch), per_sequence=(at(batch + 20) - at(batch)) / 20)


def decision(name: str) -> Report:
    """What LLMem's formulas and its rule decide on four V100s."""
    job = step_of(name, *LAYOUTS["fsdp"]).job
    request = Request(
        job=job,
        cluster=Cluster(gpu=CARD, num_gpus=4, gpus_per_node=4),
        estimator=EstimatorKind.LLMEM,
        policy=Policy.LLMEM,
    )
    return compare(request, llmem_step, kind=EstimatorKind.LLMEM)


def chosen(report: Report) -> str:
    """The method's name, or what LLMem does where there is none."""
    return "CPU offload" if report.recommended is None else report.recommended.method.value


def quickest(name: str) -> str:
    """The method that was fastest when LLMem measured."""
    ran = {
        method: seconds
        for method, seconds in zip(MEASURED, SECONDS[name], strict=True)
        if seconds is not None
    }
    return min(ran, key=lambda method: ran[method]) if ran else "CPU offload"


@cache
def largest_by_llmem(name: str, method: str) -> int:
    """The largest micro batch by LLMem's formulas."""
    return largest_micro_batch(step_of(name, *LAYOUTS[method]), llmem_step)


def fits(name: str, method: str) -> bool:
    """Whether LLMem's formulas find room for a micro batch of 1."""
    return largest_by_llmem(name, method) > 0


def wrong_outcomes() -> list[tuple[str, str]]:
    """Model and method of measured outcomes that the formulas get wrong."""
    return [
        (name, method)
        for name, times in SECONDS.items()
        for method, seconds in zip(MEASURED, times, strict=True)
        if fits(name, method) is (seconds is None)
    ]


def _excuse(cell: tuple[str, str]) -> str:
    """How far the formulas are from the other outcome, at a micro batch of 1."""
    name, method = cell
    room = BOARD_MIB - device_mib(step_of(name, *LAYOUTS[method]))
    where = "below" if room > 0 else "above"
    return f"{name} {method} ({abs(room):,.0f} MiB {where} the card at micro batch 1)"


def _single_lines() -> Iterator[str]:
    yield "| model | LLMem says | measured | formulas here, at the nearest batch | per sequence |"
    yield "|---|---|---|---|---|"
    for name, (figure, truth) in SINGLE.items():
        fit = nearest_fit(name, figure)
        yield (
            f"| {name} | {figure:,} | {truth:,} | {fit.ours:,.0f} ({fit.ours - figure:+,.0f}) at "
            f"{fit.batch} | {fit.per_sequence:,.0f} |"
        )


def _peak_lines() -> Iterator[str]:
    names = list(LAYOUTS)
    yield f"| model | {' | '.join(f'{name}: LLMem / formula' for name in names)} |"
    yield "|---" * (1 + len(names)) + "|"
    for name in SECONDS:
        cells = []
        for method, layout in LAYOUTS.values():
            step = step_of(name, method, layout)
            found = [_gib(step, estimator) for estimator in (llmem_step, estimate_step)]
            cells.append(" / ".join(found))
        yield f"| {name} | {' | '.join(cells)} |"


def _gib(step: Step, estimator: Estimator) -> str:
    return f"{estimator(step).peak_bytes.device / GIB:.1f}"


def _decision_lines() -> Iterator[str]:
    yield (
        "| model | measured s: 4DP / 2DP+2TP / 4TP | largest batch by LLMem's formulas, same order "
        "| scores | decision | fastest measured |"
    )
    yield "|---|---|---|---|---|---|"
    for name, times in SECONDS.items():
        seconds = " / ".join("OOM" if time is None else f"{time:,}" for time in times)
        batches = [largest_by_llmem(name, method) for method in MEASURED]
        report = decision(name)
        scores = ", ".join(
            f"{row.method.value} {llmem_score(row):g}"
            for row in report.methods
            if row.verdict is Verdict.FITS
        )
        yield (
            f"| {name} | {seconds} | {' / '.join(map(str, batches))} | {scores or 'all 0'} | "
            f"{chosen(report)} | {quickest(name)} |"
        )


def tables() -> str:
    """What stands between the page's marks."""
    wrong = wrong_outcomes()
    agreed = [name for name in SECONDS if chosen(decision(name)) == quickest(name)]
    return "\n".join(
        [
            "One V100, MiB as LLMem states them:",
            "",
            *_single_lines(),
            "",
            "Four V100s, micro batch 1, GiB at the level device:",
            "",
            *_peak_lines(),
            "",
            "Four V100s, what is decided:",
            "",
            *_decision_lines(),
            "",
            f"Of the {3 * len(SECONDS)} measured outcomes the formulas get {len(wrong)} wrong: "
            f"{', '.join(map(_excuse, wrong))}.",
            f"Decisions that are the fastest measured: {len(agreed)} of {len(SECONDS)}.",
        ]
    )


def main() -> None:
    """Write the tables into the page."""
    head, rest = PAGE.read_text("utf-8").split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{tables()}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
