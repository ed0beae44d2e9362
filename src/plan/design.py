"""Which steps a campaign runs: spread evenly over everything that its design varies.

Each step is a point of a scrambled Halton sequence (Halton 1960; in each coordinate the digits are
permuted and the whole is shifted at random). One coordinate chooses each thing that varies, so that
any first part of the sequence is spread as well as the whole. Points that cannot run are passed
over.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from src.architecture import describe
from src.errors import UserError
from src.memory import estimate_step
from src.plan.checks import check
from src.plan.layouts import Candidate, candidates
from src.plan.search import with_micro_batch
from src.spec import (
    Attention,
    Checkpointing,
    Cluster,
    Finetune,
    Gpu,
    Job,
    Method,
    Model,
    Optimizer,
    Precision,
    Request,
    Step,
)

_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
"""One prime for each coordinate; the smallest is spread best, and goes to the fill."""

LARGEST_MICRO_BATCH = 4096
BEYOND = (1.05, 1.5)
"""What a case beyond the card is aimed at, in cards."""

_FRUITLESS = 1000
"""After so many points in a row without a new step there is taken to be none."""

PickedT = TypeVar("PickedT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """What a campaign's steps are spread over.

    Attributes:
        models: chosen by family (`model_type`) first.
        methods, num_gpus, finetunes, precisions, optimizers, checkpointings, attentions, seq_lens:
            what is chosen from.
        fill: the least and the most of the card that a step takes at the device level, as the
            formula has it; its micro batch is the largest below a share in between.
        beyond: share of the steps that do not fit instead.
        num_steps: how many.
        seed: of the permutations.
    """

    models: tuple[Model, ...]
    methods: tuple[Method, ...]
    num_gpus: tuple[int, ...]
    finetunes: tuple[Finetune, ...]
    precisions: tuple[Precision, ...]
    optimizers: tuple[Optimizer, ...]
    checkpointings: tuple[Checkpointing, ...]
    attentions: tuple[Attention, ...]
    seq_lens: tuple[int, ...]
    fill: tuple[float, float]
    beyond: float
    num_steps: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """One step of a campaign.

    Attributes:
        step: the step.
        device_bytes: what the formula says it takes.
    """

    step: Step
    device_bytes: int

    @property
    def fill(self) -> float:
        """Share of the card, at the device level."""
        return self.device_bytes / self.step.gpu.usable_bytes


def plan_steps(
    design: Design, gpu: Gpu, *, can_run: Callable[[Step], bool]
) -> tuple[PlannedStep, ...]:
    """The steps of a design on a GPU model, no two alike; the same for the same arguments.

    Args:
        design: what is varied.
        gpu: the GPU model.
        can_run: whether the device runs a step.

    Raises:
        UserError: there are not so many steps.
    """
    found: dict[Step, PlannedStep] = {}
    num_fruitless = 0
    for point in halton(design.seed):
        planned = _planned(design, gpu, point, can_run)
        if planned is None or planned.step in found:
            num_fruitless += 1
        else:
            found[planned.step], num_fruitless = planned, 0
        if len(found) == design.num_steps:
            return tuple(found.values())
        if num_fruitless == _FRUITLESS:
            break
    allowed = f"at most {len(found)}: no more steps of this campaign can run on {gpu.sku}"
    raise UserError(key="campaign.num_cases", value=design.num_steps, allowed=allowed)


def halton(seed: int) -> Iterator[tuple[float, ...]]:
    """Points of the unit cube, one coordinate for each base; without end."""
    chance = random.Random(seed)
    digits = [chance.sample(range(1, base), base - 1) for base in _BASES]
    # 0 stays 0: a number has endless zeros in front, which would all be permuted.
    scrambled = [
        (base, [0, *rest], chance.random()) for base, rest in zip(_BASES, digits, strict=True)
    ]
    for index in count(1):
        yield tuple(
            (_radical_inverse(index, base, permutation) + shift) % 1
            for base, permutation, shift in scrambled
        )


def _radical_inverse(index: int, base: int, permutation: Sequence[int]) -> float:
    """The digits of `index` in a base, permuted, behind the point in reverse."""
    value, scale = 0.0, 1.0
    while index:
        index, digit = divmod(index, base)
        scale /= base
        value += permutation[digit] * scale
    return value


def _pick(options: Sequence[PickedT], share: float) -> PickedT:
    return options[int(share * len(options))]


def _planned(
    design: Design, gpu: Gpu, point: tuple[float, ...], can_run: Callable[[Step], bool]
) -> PlannedStep | None:
    """The step of a point; None where it cannot run, or no micro batch fills the card so."""
    fill, family, method, seq_len, precision, finetune, layout, checkpointing = point[:8]
    optimizer, attention, member = point[8:]
    families: dict[str, list[Model]] = {}
    for model in design.models:
        families.setdefault(model.model_type, []).append(model)
    job = Job(
        model=_pick(_pick(list(families.values()), family), member),
        finetune=_pick(design.finetunes, finetune),
        seq_len=_pick(design.seq_lens, seq_len),
        precision=_pick(design.precisions, precision),
        optimizer=_pick(design.optimizers, optimizer),
        checkpointing=_pick(design.checkpointings, checkpointing),
        attention=_pick(design.attentions, attention),
    )
    try:
        possible = _candidates(design, job, gpu, _pick(design.methods, method))
        if not possible:
            return None
        candidate = _pick(possible, layout)
        step = Step(
            job=job, method=candidate.method, layout=candidate.layout, gpu=gpu, micro_batch=1
        )
        return _filled(design, step, fill) if can_run(step) else None
    except UserError:
        return None


def _candidates(design: Design, job: Job, gpu: Gpu, method: Method) -> list[Candidate]:
    """Every layout of a method on any number of GPUs of the design.

    Raises:
        UserError: the job cannot run.
    """
    decoder = describe(job.model)
    if decoder.max_positions is not None and job.seq_len > decoder.max_positions:
        return []
    found: list[Candidate] = []
    for num_gpus in design.num_gpus:
        if (num_gpus == 1) is not (method is Method.SINGLE):
            continue
        cluster = Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=num_gpus)
        request = Request(job=job, cluster=cluster, methods=(method,))
        check(request, decoder)
        try:
            found += candidates(request, decoder)
        except UserError:
            continue
    return found


def _filled(design: Design, step: Step, share: float) -> PlannedStep | None:
    """The step with the micro batch that fills the card as a share of the design's range says."""

    def device_bytes(micro_batch: int) -> int:
        return estimate_step(with_micro_batch(step, micro_batch)).peak_bytes.device

    capacity, is_beyond = step.gpu.usable_bytes, share < design.beyond
    if is_beyond:
        least, most = BEYOND
        share /= design.beyond
    else:
        least, most = design.fill
        share = (share - design.beyond) / (1 - design.beyond)
    aim = (least + share * (most - least)) * capacity
    micro_batch = bisect_right(range(1, LARGEST_MICRO_BATCH + 1), aim, key=device_bytes)
    if not micro_batch:
        return None
    found = PlannedStep(
        step=with_micro_batch(step, micro_batch), device_bytes=device_bytes(micro_batch)
    )
    return found if least <= found.fill <= most else None
