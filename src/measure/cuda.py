"""One training step on a real CUDA GPU: the dry run's step on real tensors, measured.

Weights are random: bytes do not depend on their values. On more than one GPU this process is one
of as many as torchrun (or `src.measure.runner`) started. Started alone, it is rank 0 of a group
whose collectives send nothing, so that NCCL's own bytes are missing; the row says `comm=fake`. A
measurement needs a process of its own.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from src.errors import UserError
from src.measure.assumptions import eager_instead
from src.measure.blocks import find_blocks
from src.measure.build import autocast_dtype
from src.measure.case import Case
from src.measure.cuda_statistics import Statistics, TorchStatistics, driver_version
from src.measure.dry_run import (
    build,
    check,
    clipping,
    count_parameters,
    library_versions,
    vocab_size,
)
from src.measure.kernels import DISTINCT_TOKEN_FRACTION
from src.measure.measurement import Measurement, Start, Watch
from src.measure.methods import (
    LocalGradients,
    apply_method,
    build_meshes,
    local_tensor,
)
from src.measure.optimizers import build_optimizer
from src.measure.simulated import materialise
from src.measure.training import Training, run_steps, watch_blocks
from src.measure.world import local_rank, world
from src.spec import Gpu, Method
from src.units import GIB

INITIAL_DEVIATION = 0.02
"""Standard deviation of random matrices; vectors are ones."""

SEED = 0

NOTES: tuple[str, ...] = (
    "weights are random, buffers zero",
    f"a batch's tokens are drawn from {DISTINCT_TOKEN_FRACTION:.0%} as many ids",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a step is measured on.

    Attributes:
        device: the GPU; tests run the same step on the CPU.
        statistics: that GPU's.
        environment: what the row says about the machine.
    """

    device: torch.device
    statistics: Statistics
    environment: Mapping[str, object]


def measure(case: Case) -> Measurement:
    """Peaks of the case's second optimizer step on this process's GPU: the first, or its rank's.

    A step that does not fit is an outcome, not an error. The case's `gpu` is not used.

    Raises:
        UserError: there is no CUDA GPU, or the case cannot be built or measured.
    """
    _require_cuda()
    check_measurable(case)
    index = local_rank()
    torch.cuda.set_device(index)
    case = replace(case, step=replace(case.step, gpu=this_gpu(case.step.gpu, index)))
    check(case)
    target = Target(
        device=torch.device("cuda", index),
        statistics=TorchStatistics(index),
        environment=environment(index),
    )
    return run(case, target)


def visible_gpus() -> list[dict[str, object]]:
    """Every GPU that torch sees, as a row's `environment` describes it.

    Raises:
        UserError: there is none.
    """
    _require_cuda()
    return [environment(index) for index in range(torch.cuda.device_count())]


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UserError(key="device", value="cuda", allowed=f"torch sees no CUDA GPU ({_why()})")


def _why() -> str:
    if torch.version.cuda is None:
        return "this build of torch is without CUDA"
    return "no driver, or none visible"


def check_measurable(case: Case) -> None:
    """Refuse what only the simulated device runs.

    Raises:
        UserError: says why, in one line.
    """
    if case.step.job.finetune.is_quantized:
        raise UserError(
            key="finetune",
            value=case.step.job.finetune.kind,
            allowed="with device=simulated: the quantised Linears are stand-ins",
        )
    if case.step.method is Method.DDP_TP:
        raise UserError(
            key="method",
            value=case.step.method,
            allowed="with device=simulated: DistributedDataParallel takes no split parameters",
        )


def this_gpu(gpu: Gpu, index: int) -> Gpu:
    """`gpu` with what torch says of the visible one of that index."""
    found = torch.cuda.get_device_properties(index)
    return replace(
        gpu,
        name=found.name,
        compute_capability=(found.major, found.minor),
        usable_gib=found.total_memory / GIB,
        sm_count=found.multi_processor_count,
        context_mib=None,
    )


def environment(index: int) -> dict[str, object]:
    """What a row says about the machine, seen from the visible GPU of that index."""
    found = torch.cuda.get_device_properties(index)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return {
        "gpu": found.name,
        "compute_capability": [found.major, found.minor],
        "capacity_bytes": found.total_memory,
        "sm_count": found.multi_processor_count,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "allocator_config": next((os.environ[n] for n in names if n in os.environ), ""),
    }


def run(case: Case, target: Target) -> Measurement:
    """Build the case on the target, run two steps and read its statistics."""
    watch, statistics = Watch(target.statistics), target.statistics
    statistics.synchronize()
    bare = statistics.device()
    seconds: float | None = None
    message: str | None = None
    with (
        warnings.catch_warnings(),
        world(case.step.layout.num_gpus, target.device) as comm,
    ):
        warnings.simplefilter("ignore")
        statistics.synchronize()
        start = Start(
            comm=comm, bare=bare, connected=statistics.device(), memory=statistics.memory()
        )
        statistics.reset_peaks()
        torch.manual_seed(SEED)
        model, _ = build(case, whole=True)
        counts = count_parameters(model, 0)
        notes = (*NOTES, *eager_instead(case, model))
        try:
            training = _prepare(case, model, target.device, watch, comm=comm)
            seconds = _run_timed(training, watch, statistics)
        except torch.cuda.OutOfMemoryError as error:
            message = str(error)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise _cannot_measure(case, error) from error
    row = _row(target, watch, start, seconds=seconds, message=message, counts=counts)
    return replace(row, notes=notes)


def _row(
    target: Target,
    watch: Watch,
    start: Start,
    *,
    seconds: float | None,
    message: str | None,
    counts: tuple[int, int],
) -> Measurement:
    where = watch.instant
    watch.close(always=message is not None)
    memory, device = target.statistics.memory(), target.statistics.device()
    is_disturbed = bool(start.bare.num_others or device.num_others)
    is_invalid = is_disturbed or _is_beyond_the_card(target, watch)
    outcome = "invalid" if is_invalid else "ok" if message is None else "oom"
    return Measurement(
        outcome=outcome,
        source="measured" if target.device.type == "cuda" else "simulated",
        start=start,
        allocated_peaks=watch.allocated_peaks,
        reserved_peaks=watch.reserved_peaks,
        after_step_bytes=memory.allocated_bytes,
        memory=memory,
        device=device,
        step_seconds=seconds,
        oom_instant=None if message is None else where.value,
        oom_message=message,
        environment=target.environment,
        versions=library_versions(),
        num_parameters=counts[0],
        num_trainable_parameters=counts[1],
    )


def _is_beyond_the_card(target: Target, watch: Watch) -> bool:
    """Whether more was reserved than the card has: Windows drivers lend host memory."""
    capacity = target.environment.get("capacity_bytes")
    return isinstance(capacity, int) and max(watch.reserved_peaks.values(), default=0) > capacity


def _cannot_measure(case: Case, error: Exception) -> UserError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return UserError(
        key="model",
        value=case.step.job.model.name,
        allowed=f"its step cannot be measured: {type(error).__name__}: {reason[:300]}",
    )


def _prepare(
    case: Case, model: nn.Module, device: torch.device, watch: Watch, *, comm: str
) -> Training:
    step, job, loop = case.step, case.step.job, case.loop
    blocks = find_blocks(model)
    watch.num_blocks = len(blocks)
    watch_blocks(blocks, entered=lambda _index: None, reached=watch.reached_block)
    vocabulary = vocab_size(model)
    meshes = build_meshes(step, device_type=device.type)
    if not step.method.is_fsdp or loop.fsdp1 or meshes.data is None:
        make_real(model, device)
    model = apply_method(model, blocks, case, meshes, make_real=partial(make_real, device=device))
    if step.method is Method.DDP and step.layout.dp > 1:
        model = _replicate(model, device, is_fake=comm == "fake")
    trainable = [p for p in model.parameters() if p.requires_grad]
    dtype = torch.bfloat16 if loop.autocast_half_weights else autocast_dtype(job.precision)
    return Training(
        model=model,
        optimizer=build_optimizer(model, blocks, job, loop),
        make_batch=partial(_batch, case, vocabulary, device),
        autocast=None if dtype is None else partial(torch.autocast, device.type, dtype=dtype),
        clip=clipping([local_tensor(p) for p in trainable], loop.max_grad_norm),
        gradients=LocalGradients(trainable),
        loop=loop,
        saving=partial(save_on_cpu, pin_memory=True) if job.activation_offload else nullcontext,
        grad_accum=job.grad_accum,
    )


def _replicate(model: nn.Module, device: torch.device, *, is_fake: bool) -> nn.Module:
    """`model` in `DistributedDataParallel`; in a fake group buckets come back as they were filled.

    Without a hook the reducer waits for the result of its collective, and a fake group has none.
    """
    replica = nn.parallel.DistributedDataParallel(model)
    if not is_fake:
        return replica
    from torch._C._distributed_c10d import GradBucket

    def keep(_state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        future.set_result(bucket.buffer())
        return future

    # PyTorch compares the annotations with the classes themselves.
    keep.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    replica.register_comm_hook(None, keep)
    return replica


def make_real(model: nn.Module, device: torch.device) -> None:
    """Replace the model's meta tensors by real ones on `device`, tied ones once.

    What is no longer on the meta device is left alone, so that a model can be made real and sharded
    block by block.
    """
    waiting = [p for p in model.parameters() if p.is_meta]
    if not waiting and not any(buffer.is_meta for buffer in model.buffers()):
        return
    fresh = materialise(model, device=device)
    with torch.no_grad():
        for tensor in fresh:
            _fill(tensor)


def _fill(tensor: torch.Tensor) -> None:
    """Random matrices and ones for parameters, zeros for buffers (positions have to be valid)."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        tensor.zero_()
    elif tensor.dim() > 1:
        tensor.normal_(std=INITIAL_DEVIATION)
    else:
        tensor.fill_(1.0)


def _batch(case: Case, vocabulary: int, device: torch.device) -> Mapping[str, torch.Tensor]:
    """Token ids and labels, int64."""
    shape = (case.step.micro_batch, case.step.job.seq_len)
    count = round(shape[0] * shape[1] * DISTINCT_TOKEN_FRACTION)
    ids = max(1, min(vocabulary, count))
    names = ["input_ids", "labels"] + ["attention_mask"] * case.loop.attention_mask_input
    return {name: torch.randint(ids, shape, device=device) for name in names}


def _run_timed(training: Training, watch: Watch, statistics: Statistics) -> float:
    """Two steps; wall seconds of the second one."""
    started = 0.0

    def after_first() -> None:
        nonlocal started
        statistics.synchronize()
        started = time.perf_counter()

    run_steps(training, watch, after_first=after_first)
    statistics.synchronize()
    return time.perf_counter() - started
