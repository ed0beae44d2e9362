"""The step-time model beside the times that LLMem measured on four V100s.

What one run took is known in seconds, at which batch is not. All methods of a model are taken to
have run "the same fine-tuning", at one micro batch; which one is found by how the times compare.
One factor, the same for all models, stands for the number of tokens and the kernels' speed.

    python -m tests.llmem_times

writes the table between the marks of docs/llmem.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log
from statistics import fmean

from src.architecture import describe
from src.plan.throughput import tokens_per_second
from src.spec import Cluster
from tests.jobs import gpu
from tests.llmem_table import (
    LAYOUTS,
    MEASURED,
    PAGE,
    SECONDS,
    largest_by_llmem,
    quickest,
    step_of,
)

BEGIN, END = "<!-- times: begin -->", "<!-- times: end -->"
BOARD = gpu("v100-16gb-pcie")
CLUSTER = Cluster(gpu=BOARD, num_gpus=4, gpus_per_node=4)
ALIKE = 0.02
"""Times that are no further apart are in no order: codegen-2b's two differ by 1 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A model's times at the micro batch at which they compare best.

    Attributes:
        batch: that micro batch.
        seconds: method -> modelled seconds, of every method that fits by LLMem's formulas.
    """

    batch: int
    seconds: Mapping[str, float]


def measured(name: str) -> dict[str, int]:
    """Method -> measured seconds, of those that ran."""
    times = zip(MEASURED, SECONDS[name], strict=True)
    return {method: seconds for method, seconds in times if seconds is not None}


@cache
def _per_token(name: str, method: str, batch: int) -> float:
    step = step_of(name, *LAYOUTS[method], micro_batch=batch)
    return 1 / tokens_per_second(step, CLUSTER, describe(step.job.model))


def _misses(name: str, batch: int) -> list[float]:
    """log(measured / modelled) of each method that ran, up to the common factor."""
    return [log(time / _per_token(name, method, batch)) for method, time in measured(name).items()]


@cache
def _batches() -> Mapping[str, int]:
    """The micro batch of each model, and so the common factor: alternately, to the end."""
    names = [name for name in SECONDS if measured(name)]
    largest = {
        name: min(largest_by_llmem(name, method) for method in measured(name)) for name in names
    }
    found = dict(largest)
    for _ in range(20):
        factor = fmean(fmean(_misses(name, found[name])) for name in names)

        def badness(name: str, batch: int, factor: float = factor) -> float:
            return sum((miss - factor) ** 2 for miss in _misses(name, batch))

        better = {
            name: min(range(1, largest[name] + 1), key=lambda batch: badness(name, batch))
            for name in names
        }
        if better == found:
            break
        found = better
    return found


def factor() -> float:
    """Measured seconds of one modelled second per token."""
    batches = _batches()
    return exp(fmean(fmean(_misses(name, batch)) for name, batch in batches.items()))


def timing(name: str) -> Timing | None:
    """A model's modelled times; None where nothing ran."""
    if name not in _batches():
        return None
    batch = _batches()[name]
    fitting = [method for method in MEASURED if largest_by_llmem(name, method) >= batch]
    seconds = {method: factor() * _per_token(name, method, batch) for method in fitting}
    return Timing(batch=batch, seconds=seconds)


def order_agrees(name: str) -> bool:
    """Whether the methods that ran are in the measured order."""
    ran, mine = measured(name), timing(name)
    pairs = [(a, b) for a in ran for b in ran if ran[a] * (1 + ALIKE) < ran[b]]
    return mine is None or all(mine.seconds[a] < mine.seconds[b] for a, b in pairs)


def choice(name: str) -> str:
    """The fastest method of those that fit by LLMem's formulas."""
    mine = timing(name)
    if mine is None or not mine.seconds:
        return "CPU offload"
    return min(mine.seconds, key=lambda method: mine.seconds[method])


def _lines() -> Iterator[str]:
    yield "| model | measured s: 4DP / 2DP+2TP / 4TP | modelled, those that fit | at micro batch |"
    yield "|---|---|---|---|"
    for name, times in SECONDS.items():
        mine = timing(name)
        found = " / ".join("OOM" if time is None else f"{time:,}" for time in times)
        if mine is None:
            yield f"| {name} | {found} | none fits | - |"
            continue
        said = (
            f"{mine.seconds[method]:,.0f}" if method in mine.seconds else "OOM"
            for method in MEASURED
        )
        yield f"| {name} | {found} | {' / '.join(said)} | {mine.batch} |"


def table() -> str:
    """What stands between the page's marks."""
    ordered = sum(order_agrees(name) for name in SECONDS)
    chosen = sum(choice(name) == quickest(name) for name in SECONDS)
    ending = (
        f"In the measured order: the methods of {ordered} of {len(SECONDS)} models; "
        f"the fastest that fits is the fastest measured: {chosen} of {len(SECONDS)}."
    )
    return "\n".join([*_lines(), "", ending])


def main() -> None:
    """Write the table into the page."""
    head, rest = PAGE.read_text("utf-8").split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()
