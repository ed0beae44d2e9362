"""From the composed configuration to frozen specs; below this no one sees a DictConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.config.calibration import CHAMPION
from src.config.gpu import resolve_gpu
from src.config.keys import (
    FORMATS,
    KEYS,
    LAYOUTS,
    LISTINGS,
    PAGE_SUFFIXES,
    PLOT_SUFFIXES,
    SNAPSHOT_SUFFIXES,
)
from src.config.lengths import resolve_seq_len
from src.config.model import resolve_model
from src.errors import UserError, unknown_name
from src.spec import (
    DRY_RUN_LIMIT_S,
    FINETUNE_OPTIONS,
    Attention,
    Checkpointing,
    Cluster,
    EstimatorKind,
    Finetune,
    FinetuneKind,
    Gpu,
    Job,
    Loss,
    Method,
    Model,
    Offload,
    Optimizer,
    Policy,
    Precision,
    Quantization,
    Request,
    Runtime,
    Unknown,
    Upcast,
    ZeroBuffers,
    parse_choice,
)
from src.spec.job import require_positive

if TYPE_CHECKING:
    from src.config.measured import Measured

_ALL_METHODS = "all"
_CORRECTED = (EstimatorKind.AUTO, EstimatorKind.CALIBRATED)
_DEFAULT_INTERNODE_GBPS = {f.name: f.default for f in fields(Cluster)}["internode_gbps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        request: the request.
        warnings: what the reader has to know about how it was understood.
        dry_run_limit_s: seconds that one dry run may take.
        champion: the folder of the correction.
        measured: what the estimate is held against; None: nothing.
    """

    request: Request
    warnings: tuple[str, ...]
    dry_run_limit_s: int
    champion: Path = CHAMPION
    measured: Measured | None = None

    def told_first(self, warnings: tuple[str, ...]) -> Question:
        """The question with warnings before its own."""
        return replace(self, warnings=(*warnings, *self.warnings))


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What is printed and drawn.

    Attributes:
        format: one of FORMATS.
        plot: the picture's file; None: no picture.
        snapshot: the file for PyTorch's memory viewer; None: no snapshot.
        page: the file of the HTML page; None: no page.
        listing: one of LISTINGS, printed in place of an answer; None: the answer.
        layouts: one of LAYOUTS, printed in place of an answer; None: the answer.
    """

    format: str
    plot: Path | None
    snapshot: Path | None
    page: Path | None
    listing: str | None
    layouts: str | None


def to_output(cfg: DictConfig) -> Output:
    """The output options.

    Raises:
        UserError: a value is not allowed.
    """
    keys = container(cfg)
    form = _choice(keys, "format", FORMATS)
    if form == "csv" and keys["measured"] is not None:
        allowed = "only with format=table or json"
        raise UserError(key="measured", value=keys["measured"], allowed=allowed)
    listing = None if keys["list"] is None else _choice(keys, "list", LISTINGS)
    snapshot = output_file(keys, "snapshot", SNAPSHOT_SUFFIXES, allowed=KEYS["snapshot"].allowed)
    if snapshot is not None:
        _check_snapshot(keys)
    layouts = None if keys["layouts"] is None else _choice(keys, "layouts", LAYOUTS)
    if layouts is not None:
        _check_layouts(keys)
    return Output(
        format=form,
        plot=output_file(keys, "plot", PLOT_SUFFIXES, allowed=KEYS["plot"].allowed),
        snapshot=snapshot,
        page=output_file(keys, "report", PAGE_SUFFIXES, allowed=KEYS["report"].allowed),
        listing=listing,
        layouts=layouts,
    )


def output_file(
    keys: Mapping[str, Any], key: str, suffixes: tuple[str, ...], *, allowed: str
) -> Path | None:
    """The file to write, in a folder that exists; None where none was asked for.

    Raises:
        UserError: its name ends otherwise, or it cannot be there.
    """
    if keys[key] is None:
        return None
    path = Path(keys[key]).expanduser()
    if path.suffix.casefold() not in suffixes:
        raise UserError(key=key, value=keys[key], allowed=allowed)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(key=key, value=keys[key], allowed="a file in a folder that exists")
    return path


def _check_layouts(keys: Mapping[str, Any]) -> None:
    """Many layouts are rows alone, and all of them no table."""
    for key in ("plot", "snapshot", "report", "solve", "measured"):
        if keys[key] is not None:
            raise UserError(key=key, value=keys[key], allowed="without layouts, which prints rows")
    if keys["layouts"] == "all" and keys["format"] == "table":
        raise UserError(key="layouts", value="all", allowed="with format=csv or format=json")


def _check_snapshot(keys: Mapping[str, Any]) -> None:
    """A snapshot is of one step of one dry run."""
    is_one = keys["gpus"] == 1 or (len(keys["method"]) == 1 and keys["method"] != [_ALL_METHODS])
    if keys["estimator"] != EstimatorKind.DRYRUN or not is_one:
        allowed = "only with estimator=dryrun and one method"
        raise UserError(key="snapshot", value=keys["snapshot"], allowed=allowed)


def _choice(keys: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = str(keys[key])
    if value not in known:
        raise unknown_name(key=key, value=value, known=known, what=f"values of {key}")
    return value


def to_request(cfg: DictConfig) -> Question:
    """The request, with every default filled in.

    Raises:
        UserError: a value is not allowed.
    """
    keys = container(cfg)
    if keys["model"] == "???":
        raise UserError(
            key="model", value="", allowed=f"needed, e.g. model=opt-1.3b; {KEYS['model'].allowed}"
        )
    methods = _methods(keys["method"])
    finetune = _finetune(keys["finetune"])
    trust = keys["trust_remote_code"]
    model, warnings = resolve_model(keys["model"], arch=keys["arch"], trust_remote_code=trust)
    gpu, gpu_warnings = resolve_gpu(keys["gpu"])
    seq_len, lengths = resolve_seq_len(keys["seq_len"])
    request = Request(
        job=_job(keys, model, finetune, seq_len),
        cluster=_cluster(keys, gpu),
        methods=methods,
        tp=keys["tp"],
        micro_batch=keys["micro_batch"],
        lengths=lengths,
        estimator=_estimator(keys),
        policy=parse_choice(Policy, keys["policy"], key="policy"),
        solve=None if keys["solve"] is None else parse_choice(Unknown, keys["solve"], key="solve"),
    )
    limit = keys["dryrun"]["time_limit_s"]
    require_positive("dryrun.time_limit_s", limit)
    without_effect = _without_effect(request, gpus_per_node=keys["gpus_per_node"])
    makes_dry_runs = request.estimator in (EstimatorKind.AUTO, EstimatorKind.DRYRUN)
    if not makes_dry_runs and limit != DRY_RUN_LIMIT_S:
        without_effect.append(
            f"dryrun.time_limit_s has no effect with estimator={request.estimator}"
        )
    champion = keys["champion"]
    if champion is not None and request.estimator not in _CORRECTED:
        without_effect.append(f"champion has no effect with estimator={request.estimator}")
    return Question(
        request=request,
        warnings=(*warnings, *gpu_warnings, *without_effect),
        dry_run_limit_s=limit,
        champion=CHAMPION if champion is None else Path(champion).expanduser(),
        measured=_measured(keys, request),
    )


def _measured(keys: Mapping[str, Any], request: Request) -> Measured | None:
    """What the estimate is held against."""
    if keys["measured"] is None:
        return None
    if request.solve is not None:
        allowed = "not with solve: an estimate of one job is held against it"
        raise UserError(key="measured", value=keys["measured"], allowed=allowed)
    from src.config.measured import read_measured

    return read_measured(keys["measured"], request)


def _estimator(keys: Mapping[str, Any]) -> EstimatorKind:
    """The estimator that was asked for, or the one that speaks of the runtime."""
    kind = parse_choice(EstimatorKind, keys["estimator"], key="estimator")
    if keys["runtime"] is None:
        return kind
    runtime = parse_choice(Runtime, keys["runtime"], key="runtime")
    if runtime is Runtime.GEMINI and kind is EstimatorKind.AUTO:
        return EstimatorKind.LLMEM
    if (runtime is Runtime.GEMINI) != (kind is EstimatorKind.LLMEM):
        allowed = f"estimator={kind} does not speak of it; gemini and estimator=llmem go together"
        raise UserError(key="runtime", value=runtime.value, allowed=allowed)
    return kind


def container(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values.

    Raises:
        UserError: a value refers to one that is not there.
    """
    try:
        keys = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        key = str(getattr(error, "full_key", None) or "arguments")
        written = OmegaConf.to_container(cfg, resolve=False)
        value = written.get(key, "") if isinstance(written, dict) else ""
        raise UserError(key=key, value=value, allowed=reason) from error
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def _methods(names: list[str]) -> tuple[Method, ...]:
    if names == [_ALL_METHODS]:
        return ()
    if not names:
        raise UserError(key="method", value="[]", allowed=KEYS["method"].allowed)
    _require_words("method", names)
    methods = [parse_choice(Method, name, key="method") for name in names]
    return tuple(dict.fromkeys(methods))


def _require_words(key: str, values: list[Any]) -> None:
    """OmegaConf lets a list into a list of words; it is refused here."""
    if not all(isinstance(value, str) and value for value in values):
        raise UserError(key=key, value=values, allowed=KEYS[key].allowed)


def _finetune(keys: Mapping[str, Any]) -> Finetune:
    kind = parse_choice(FinetuneKind, keys["kind"], key="finetune")
    given = {name: value for name, value in keys.items() if name != "kind" and value is not None}
    for name, value in given.items():
        if name not in FINETUNE_OPTIONS[kind]:
            kinds = [str(other) for other, options in FINETUNE_OPTIONS.items() if name in options]
            allowed = f"only together with finetune={' or '.join(kinds)}"
            raise UserError(key=f"finetune.{name}", value=value, allowed=allowed)
    if "targets" in given:
        _require_words("finetune.targets", given["targets"])
        given["targets"] = tuple(given["targets"])
    choices: dict[str, type[Quantization] | type[Upcast]] = {
        "quantization": Quantization,
        "upcast": Upcast,
    }
    for name in choices.keys() & given.keys():
        given[name] = parse_choice(choices[name], given[name], key=f"finetune.{name}")
    return Finetune(kind=kind, **given)


def _job(keys: Mapping[str, Any], model: Model, finetune: Finetune, seq_len: int) -> Job:
    return Job(
        model=model,
        finetune=finetune,
        seq_len=seq_len,
        grad_accum=keys["grad_accum"],
        precision=parse_choice(Precision, keys["precision"], key="precision"),
        optimizer=parse_choice(Optimizer, keys["optimizer"], key="optimizer"),
        checkpointing=parse_choice(Checkpointing, keys["checkpointing"], key="checkpointing"),
        attention=parse_choice(Attention, keys["attention"], key="attention"),
        checkpoint_every=keys["checkpoint_every"],
        loss=parse_choice(Loss, keys["loss"], key="loss"),
        offload=parse_choice(Offload, keys["offload"], key="offload"),
        activation_offload=keys["activation_offload"],
        sequence_parallel=keys["sequence_parallel"],
        vocab_parallel=keys["vocab_parallel"],
        fp32_reduce=keys["fp32_reduce"],
        zero=ZeroBuffers(**keys["zero"]),
    )


def _cluster(keys: Mapping[str, Any], gpu: Gpu) -> Cluster:
    if not math.isfinite(keys["internode_gbps"]):
        allowed = KEYS["internode_gbps"].allowed
        raise UserError(key="internode_gbps", value=keys["internode_gbps"], allowed=allowed)
    given = keys["gpus_per_node"]
    return Cluster(
        gpu=gpu,
        num_gpus=keys["gpus"],
        gpus_per_node=gpu.gpus_per_node if given is None else given,
        internode_gbps=keys["internode_gbps"],
    )


def _without_effect(request: Request, *, gpus_per_node: int | None) -> list[str]:
    """One warning for each option that was given and changes nothing, or was assumed."""
    cluster, methods = request.cluster, request.methods
    warnings = []
    if gpus_per_node is not None and cluster.num_gpus == 1:
        warnings.append("gpus_per_node has no effect with gpus=1")
    if gpus_per_node is None and cluster.num_nodes > 1:
        warnings.append(
            f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs are assumed, as usual for "
            f"{cluster.gpu.sku}; gpus_per_node changes it"
        )
    if cluster.num_nodes == 1 and cluster.internode_gbps != _DEFAULT_INTERNODE_GBPS:
        warnings.append("internode_gbps has no effect on one node")
    if methods and request.job.zero != ZeroBuffers() and not any(m.is_zero for m in methods):
        warnings.append("zero.* has no effect: no method asked for is zero1, zero2 or zero3")
    if methods and request.tp is not None and not any(m.has_tensor_parallel for m in methods):
        warnings.append("tp has no effect: no method asked for has tensor parallelism")
    return warnings
