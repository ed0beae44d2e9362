"""From the composed configuration of `src.profile` to a frozen campaign."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from src.config.gpu import DEFAULT_SKU, load_gpu, resolve_gpu
from src.config.launcher import is_slurm, to_jobs
from src.config.model import resolve_model
from src.config.profile_keys import PROFILE
from src.config.request import container, output_file
from src.config.zoo import CONF, find
from src.errors import UserError, unknown_name
from src.launch import Jobs
from src.measure.case import DEVICES
from src.measure.client import case_of
from src.measure.coverage import require_covered
from src.measure.options import LoopOptions
from src.measure.runner import Conditions, git_commit, visible_gpus
from src.plan.design import Design, PlannedStep, plan_steps
from src.record import case_id_of
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Gpu,
    Method,
    Model,
    Optimizer,
    Precision,
    Step,
    parse_choice,
)
from src.spec.job import require_positive
from src.units import GIB

PROJECT = CONF.parent
ROWS = PROJECT / "profiling"
SIMULATED_ROWS = ROWS / "simulated"
"""Rows of the simulated device; git ignores them, and nothing takes them for measured ones."""

_CUDA = "cuda"
ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What `src.profile` is asked.

    Attributes:
        gpu: the GPU model that the steps are for.
        steps: every step, in order.
        cases: the same as the worker's JSON cases.
        conditions: how they are run.
        rows: the file of its rows.
        jobs: the jobs that they become on a cluster; None: they run here.
        warnings: what the reader has to know about how it was understood.
    """

    gpu: Gpu
    steps: tuple[PlannedStep, ...]
    cases: tuple[dict[str, Any], ...]
    conditions: Conditions
    rows: Path
    jobs: Jobs | None = None
    warnings: tuple[str, ...] = ()

    @property
    def case_ids(self) -> list[str]:
        """The name of each case."""
        return [case_id_of(case) for case in self.cases]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What else `src.profile` is asked.

    Attributes:
        plan_only: list the campaign's steps and run none.
        cases: the file to write the cases to; None: none.
        sync: run nothing, and log what MLflow does not have.
        imported: run nothing, and take over these files.
        rows: the file that was asked for; None: the default.
        tracking_uri: MLflow's; None: the environment's or the project's.
    """

    plan_only: bool
    cases: Path | None
    sync: bool
    imported: tuple[Path, ...]
    rows: Path | None
    tracking_uri: str | None


def to_options(cfg: DictConfig) -> ProfileOptions:
    """The options.

    Raises:
        UserError: a value is not allowed.
    """
    keys = container(cfg)
    if keys["cases"] is not None and not keys["plan_only"]:
        raise UserError(key="cases", value=keys["cases"], allowed="only with plan_only=true")
    if keys["plan_only"] and keys["sync"]:
        raise UserError(
            key="sync", value="true", allowed="without plan_only=true: it plans nothing"
        )
    if keys["imported"] and (keys["plan_only"] or keys["sync"]):
        allowed = "without plan_only=true and sync=true"
        raise UserError(key="import", value=keys["imported"], allowed=allowed)
    if "" in keys["imported"]:
        raise UserError(key="import", value="", allowed=PROFILE.allowed_for("import"))
    return ProfileOptions(
        plan_only=keys["plan_only"],
        cases=output_file(keys, "cases", (".jsonl",), allowed=PROFILE.allowed_for("cases")),
        sync=keys["sync"],
        imported=tuple(Path(name).expanduser().absolute() for name in keys["imported"]),
        rows=_rows(keys),
        tracking_uri=keys["tracking"]["uri"],
    )


def _rows(keys: Mapping[str, Any]) -> Path | None:
    if keys["out"] is None:
        return None
    path = Path(keys["out"]).expanduser()
    if path.suffix != ".jsonl" or path.is_dir():
        raise UserError(key="out", value=keys["out"], allowed=PROFILE.allowed_for("out"))
    return path.absolute()


def to_campaign(cfg: DictConfig) -> Campaign:
    """The campaign, with every step planned; asks this machine's GPUs if they are to run it.

    Raises:
        UserError: a value is not allowed, or there is no GPU.
    """
    keys = container(cfg)
    mine, device = keys["campaign"], _device(keys)
    _check_numbers(keys)
    design, warnings = _design(mine, seed=keys["seed"])
    gpu, num_gpus, gpu_warnings = _gpu(keys, device)
    minutes = _first(keys["budget_minutes"], mine["budget_minutes"])
    rows = _rows(keys) or default_rows(mine["name"], gpu.sku, device)
    timeout_s = _first(keys["timeout_s"], mine["timeout_s"])
    jobs = to_jobs(keys, rows=rows, timeout_s=timeout_s)
    steps = plan_steps(design, gpu, can_run=lambda step: _can_run(step, device))
    return Campaign(
        gpu=gpu,
        steps=steps,
        cases=tuple(
            json.loads(json.dumps({**case_of(planned.step), "device": device})) for planned in steps
        ),
        conditions=Conditions(
            campaign=mine["name"],
            timeout_s=timeout_s,
            budget_s=None if minutes is None else minutes * 60,
            num_gpus=num_gpus,
            git_commit=git_commit(),
        ),
        rows=rows,
        jobs=jobs,
        warnings=(*warnings, *gpu_warnings),
    )


def default_rows(campaign: str, sku: str, device: str) -> Path:
    """Where the rows of a campaign lie unless `out=` says otherwise."""
    return (ROWS if device == _CUDA else SIMULATED_ROWS) / sku / f"{campaign}.jsonl"


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _device(keys: Mapping[str, Any]) -> str:
    device = str(keys["device"])
    if device not in DEVICES:
        raise unknown_name(key="device", value=device, known=DEVICES, what="devices")
    return device


def _check_numbers(keys: Mapping[str, Any]) -> None:
    minutes = keys["budget_minutes"]
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        allowed = PROFILE.allowed_for("budget_minutes")
        raise UserError(key="budget_minutes", value=minutes, allowed=allowed)
    if keys["timeout_s"] is not None:
        require_positive("timeout_s", keys["timeout_s"])
    if keys["seed"] < 0:
        raise UserError(key="seed", value=keys["seed"], allowed=PROFILE.allowed_for("seed"))


def _design(mine: Mapping[str, Any], *, seed: int) -> tuple[Design, tuple[str, ...]]:
    warnings: list[str] = []
    models: list[Model] = []
    for name in _some(mine, "models"):
        model, of_model = resolve_model(str(name), arch={}, trust_remote_code=False)
        models.append(model)
        warnings += of_model
    require_positive("campaign.num_cases", mine["num_cases"])
    kinds = _choices(mine, "finetunes", FinetuneKind)
    design = Design(
        models=tuple(models),
        methods=_choices(mine, "methods", Method),
        num_gpus=_counts(mine, "num_gpus"),
        finetunes=tuple(Finetune(kind=kind) for kind in kinds),
        precisions=_choices(mine, "precisions", Precision),
        optimizers=_choices(mine, "optimizers", Optimizer),
        checkpointings=_choices(mine, "checkpointings", Checkpointing),
        attentions=_choices(mine, "attentions", Attention),
        seq_lens=_counts(mine, "seq_lens"),
        fill=_fill(mine["fill"]),
        beyond=_share(mine["beyond"]),
        num_steps=mine["num_cases"],
        seed=seed,
    )
    return design, tuple(warnings)


def _refused(mine: Mapping[str, Any], name: str) -> UserError:
    key = f"campaign.{name}"
    return UserError(key=key, value=mine[name], allowed=PROFILE.allowed_for(key))


def _some(mine: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = mine[name]
    if not values or not all(isinstance(value, str | int) for value in values):
        raise _refused(mine, name)
    return list(dict.fromkeys(values))


def _choices(mine: Mapping[str, Any], name: str, kind: type[ChoiceT]) -> tuple[ChoiceT, ...]:
    key = f"campaign.{name}"
    return tuple(parse_choice(kind, str(value), key=key) for value in _some(mine, name))


def _counts(mine: Mapping[str, Any], name: str) -> tuple[int, ...]:
    for value in _some(mine, name):
        require_positive(f"campaign.{name}", value)
    return tuple(_some(mine, name))


def _fill(values: list[float]) -> tuple[float, float]:
    if len(values) != 2 or not 0 < values[0] < values[1] <= 1:
        raise _refused({"fill": values}, "fill")
    return values[0], values[1]


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        raise _refused({"beyond": value}, "beyond")
    return value


def _gpu(keys: Mapping[str, Any], device: str) -> tuple[Gpu, int, tuple[str, ...]]:
    """The GPU model, how many of them run the steps, and warnings."""
    written, is_auto = keys["gpu"], keys["gpu"].casefold() == "auto"
    if device != _CUDA:
        gpu, warnings = resolve_gpu(keys["campaign"]["gpu"] if is_auto else written)
        return gpu, 0, warnings
    if is_slurm(keys) and is_auto:
        allowed = "the cluster's, as gpu=h100-80gb, with launcher=slurm"
        raise UserError(key="gpu", value=written, allowed=allowed)
    if is_slurm(keys) or (keys["plan_only"] and not is_auto):
        gpu, warnings = resolve_gpu(written)
        return gpu, 0, warnings
    found = visible_gpus()
    ignored = (
        () if is_auto else (f"gpu={written} has no effect: device=cuda runs on this machine's",)
    )
    return gpu_of(found[0]), len(found), ignored


def gpu_of(found: Mapping[str, Any]) -> Gpu:
    """The spec of a GPU as torch describes it.

    One that conf/gpu does not know gets an A100's speeds, which bear on no byte.
    """
    name, (major, minor) = str(found["gpu"]), found["compute_capability"]
    sku = find("gpu", name)
    known = load_gpu(sku or DEFAULT_SKU)
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.casefold())
    return replace(
        known,
        sku=sku or "-".join(filter(None, slug.split("-"))),
        name=name,
        compute_capability=(major, minor),
        usable_gib=found["capacity_bytes"] / GIB,
        sm_count=found["sm_count"],
        context_mib=known.context_mib if sku else None,
    )


def _can_run(step: Step, device: str) -> bool:
    """Whether the step builder runs the step."""
    try:
        require_covered(step.job, step.method, LoopOptions())
    except UserError:
        return False
    if step.job.attention is Attention.FLASH and step.gpu.compute_capability < (8, 0):
        return False
    # DistributedDataParallel takes no split parameters.
    return not (device == _CUDA and step.method is Method.DDP_TP)


__all__ = [
    "Campaign",
    "ProfileOptions",
    "default_rows",
    "gpu_of",
    "to_campaign",
    "to_options",
]
