"""Settings of two steps side by side, and what each that differs moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from src.architecture import describe, supported_model_types
from src.errors import UserError
from src.measure.case import Case
from src.measure.options import LoopOptions
from src.plan.gap.result import SettingGap
from src.plan.search import Estimator
from src.spec import FINETUNE_OPTIONS, Finetune, Job, Model, Step, ZeroBuffers
from src.units import Levels

_APART = {"model", "finetune", "zero"}
"""Fields of a job that are compared in parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting of two values.

    Attributes:
        key: as it is typed.
        asked, measured: its values.
        alone: the asked step with this setting as measured; None: no estimator knows it.
    """

    key: str
    asked: Any
    measured: Any
    alone: Callable[[], Step] | None


def differences(asked: Step, measured: Case) -> list[Difference]:
    """Every setting of a measured case that the asked step has otherwise."""
    other = measured.step
    found = [*_model(asked, other), *_spread(asked, other), *_job(asked, other)]
    found += [*_finetune(asked, other), *_zero(asked, other)]
    default = LoopOptions()
    for item in fields(LoopOptions):
        usual, value = getattr(default, item.name), getattr(measured.loop, item.name)
        if usual != value:
            key = f"loop.{item.name}"
            found.append(Difference(key=key, asked=usual, measured=value, alone=None))
    return found


def is_same_model(asked: Model, other: Model) -> bool:
    """Whether two configs describe one model, whatever its name and what else is in them."""
    if asked.config == other.config:
        return True
    if {asked.model_type, other.model_type} <= set(supported_model_types()):
        return describe(asked) == describe(other)
    return False


def _model(asked: Step, other: Step) -> Iterator[Difference]:
    mine, model = asked.job.model, other.job.model
    if is_same_model(mine, model):
        return
    names = (mine.name, model.name)
    key, values = "model", names
    if mine.name == model.name:
        changed = [
            name
            for name in sorted({*mine.config, *model.config})
            if mine.config.get(name) != model.config.get(name)
        ]
        first = changed[0]
        key, values = f"arch.{first}", (str(mine.config.get(first)), str(model.config.get(first)))
        if len(changed) > 1:
            key += f" and {len(changed) - 1} more"
    yield Difference(
        key=key,
        asked=values[0],
        measured=values[1],
        alone=lambda: replace(asked, job=replace(asked.job, model=model)),
    )


def _spread(asked: Step, other: Step) -> Iterator[Difference]:
    """GPU, method with its degrees, micro batch."""
    if asked.gpu.sku != other.gpu.sku:
        yield Difference(
            key="gpu",
            asked=asked.gpu.sku,
            measured=other.gpu.sku,
            alone=lambda: replace(asked, gpu=other.gpu),
        )
    if (asked.method, asked.layout) != (other.method, other.layout):
        same_method = asked.method is other.method
        same_gpus = asked.layout.num_gpus == other.layout.num_gpus
        key = "method" if not same_method else "layout" if same_gpus else "gpus"
        yield Difference(
            key=key,
            asked=spread_words(asked),
            measured=spread_words(other),
            alone=lambda: replace(asked, method=other.method, layout=other.layout),
        )
    if asked.micro_batch != other.micro_batch:
        yield Difference(
            key="micro_batch",
            asked=asked.micro_batch,
            measured=other.micro_batch,
            alone=lambda: replace(asked, micro_batch=other.micro_batch),
        )


def spread_words(step: Step) -> str:
    """Method and degrees above 1: `fsdp dp4 shard4`."""
    layout = step.layout
    degrees = {"dp": layout.dp, "tp": layout.tp, "shard": layout.shard}
    return " ".join([step.method, *(f"{name}{size}" for name, size in degrees.items() if size > 1)])


def _job(asked: Step, other: Step) -> Iterator[Difference]:
    for item in fields(Job):
        mine, value = getattr(asked.job, item.name), getattr(other.job, item.name)
        if item.name in _APART or mine == value:
            continue
        yield _of_job(asked, item.name, mine, value, **{item.name: value})


def _of_job(asked: Step, key: str, mine: Any, value: Any, **changes: Any) -> Difference:
    return Difference(
        key=key,
        asked=mine,
        measured=value,
        alone=lambda: replace(asked, job=replace(asked.job, **changes)),
    )


def _finetune(asked: Step, other: Step) -> Iterator[Difference]:
    mine, value = asked.job.finetune, other.job.finetune
    if mine.kind is not value.kind:
        yield _of_job(asked, "finetune", _words(mine), _words(value), finetune=value)
        return
    for name in FINETUNE_OPTIONS[mine.kind]:
        before, after = getattr(mine, name), getattr(value, name)
        if before != after:
            changed = replace(mine, **{name: after})
            yield _of_job(asked, f"finetune.{name}", before, after, finetune=changed)


def _words(finetune: Finetune) -> str:
    rank = f" r{finetune.r}" if finetune.is_lora else ""
    return f"{finetune.kind}{rank}"


def _zero(asked: Step, other: Step) -> Iterator[Difference]:
    if not (asked.method.is_zero and other.method.is_zero):
        return
    mine, value = asked.job.zero, other.job.zero
    for item in fields(ZeroBuffers):
        before, after = getattr(mine, item.name), getattr(value, item.name)
        if before != after:
            changed = replace(mine, **{item.name: after})
            yield _of_job(asked, f"zero.{item.name}", before, after, zero=changed)


def moved(
    found: list[Difference], estimator: Estimator, estimate: Levels
) -> tuple[SettingGap, ...]:
    """Each difference with what it moves alone; those that move most bytes first.

    Args:
        found: the differences.
        estimator: who answers.
        estimate: its answer to the asked step.
    """
    gaps = [
        SettingGap(
            key=each.key,
            asked=shown(each.asked),
            measured=shown(each.measured),
            moved_bytes=_moved(each, estimator, estimate),
        )
        for each in found
    ]
    gaps.sort(key=lambda gap: -1 if gap.moved_bytes is None else abs(gap.moved_bytes.device))
    return tuple(reversed(gaps))


def _moved(each: Difference, estimator: Estimator, estimate: Levels) -> Levels | None:
    if each.alone is None:
        return None
    try:
        changed = estimator(each.alone()).peak_bytes
    except UserError:
        return None
    return Levels(
        allocated=changed.allocated - estimate.allocated,
        reserved=changed.reserved - estimate.reserved,
        device=changed.device - estimate.device,
    )


def shown(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value)
