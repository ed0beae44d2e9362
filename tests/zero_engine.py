"""DeepSpeed's own ZeRO engine on fake tensors: `python -m tests.zero_engine`.

For a Python that has DeepSpeed beside torch, transformers and peft (DeepSpeed is no dependency of
this project; `DS_BUILD_OPS=0 DS_ACCELERATOR=cpu`). One JSON case a line on stdin, as
`src.measure.worker` takes it, one JSON answer a line on stdout.

Model, loss, kernels and trace are the dry run's. The engine thinks that it is on a CPU, so what it
puts on the host is told apart by the device it names: `cpu` is the host, the accelerator's own name
`cpu:0` the GPU. Ranks are faked: this process is rank `rank` of a group that sends nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from src.measure.blocks import find_blocks
from src.measure.case import Case, parse_case
from src.measure.dry_run import build
from src.measure.events import Instant
from src.measure.ledger import rounded
from src.measure.optimizers import build_optimizer
from src.measure.simulated import SimulatedDevice, materialise
from src.measure.training import watch_blocks
from src.spec import Method, Offload, Precision
from tests.zero_sides import PINNED, EngineRecorder, SidedTrace

aten = torch.ops.aten

FOLLOWED_STEP = {Method.ZERO1: 2, Method.ZERO2: 2, Method.ZERO3: 3}
"""Stage 3 records its trace in the second forward pass and follows it from the third on."""

GPU_NAME = "cpu:0"
HALF = {Precision.BF16_MIXED: "bf16", Precision.FP16_MIXED: "fp16"}


class _NoKernel:
    """DeepSpeedCPUAdam's compiled update, which works in place."""

    def __getattr__(self, _name: str) -> Callable[..., int]:
        return lambda *_args, **_kwargs: 0


def config_of(case: Case) -> dict[str, Any]:
    """The engine's configuration, as the Trainer and accelerate hand it over."""
    step, job = case.step, case.step.job
    stage = int(step.method.value[-1])
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": job.zero.reduce_bucket_size}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": job.zero.prefetch_bucket_size,
            "stage3_param_persistence_threshold": job.zero.param_persistence_threshold,
            "stage3_max_live_parameters": job.zero.max_live_parameters,
        }
    if job.offload is not Offload.NONE:
        zero["offload_optimizer"] = {"device": "cpu"}
    if job.offload is Offload.ALL:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": step.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "gradient_clipping": case.loop.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    half = HALF.get(job.precision)
    if half is not None:
        config[half] = {"enabled": True}
    if job.zero.fp32_gradients:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if job.fp32_reduce:
        config["communication_data_type"] = "fp32"
    return config


def optimizer_of(case: Case, model: nn.Module, blocks: list[nn.Module]) -> torch.optim.Optimizer:
    """The job's optimizer; AdamW becomes DeepSpeed's on the CPU where states are offloaded."""
    made = build_optimizer(model, blocks, case.step.job, case.loop)
    if case.step.job.offload is Offload.NONE:
        return made
    if "adamw" in case.step.job.optimizer.value:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(made.param_groups)
    for group in made.param_groups:
        group["foreach"] = False
    return made


@contextmanager
def engine_world(recorder: EngineRecorder, num_gpus: int, rank: int) -> Iterator[None]:
    """A process group of `num_gpus` that sends nothing, and an accelerator with a name."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    zero = "deepspeed.runtime.zero"
    same = "assert_ints_same_as_other_ranks"
    accelerator = get_accelerator()
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_gpus)
        stack.callback(dist.destroy_process_group)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        for name in (f"{zero}.partition_parameters", f"{zero}.partitioned_param_coordinator",
                     f"{zero}.stage3"):  # fmt: skip
            module = importlib.import_module(name)
            if hasattr(module, same):
                stack.enter_context(mock.patch.object(module, same))
        builder = importlib.import_module("deepspeed.ops.adam.cpu_adam").CPUAdamBuilder
        for target, name, value in (
            (accelerator, "current_device_name", lambda: GPU_NAME),
            (accelerator, "device_name", lambda _index=None: GPU_NAME),
            (accelerator, "on_accelerator", lambda tensor: not recorder.host.knows(tensor)),
            (accelerator, "is_fp16_supported", lambda: True),
            (accelerator, "is_bf16_supported", lambda: True),
            (accelerator, "pin_memory", recorder.pinned),
            (builder, "load", lambda _self: _NoKernel()),
            (torch.Tensor, "to", lambda tensor, *args, **kw: recorder.to(tensor, *args, **kw)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def watch_sync(optimizer: Any, device: SimulatedDevice) -> None:
    """Enter `gradient_sync` where the engine reduces what is left."""
    for name in ("reduce_gradients", "independent_gradient_partition_epilogue",
                 "backward_epilogue"):  # fmt: skip
        original = getattr(optimizer, name, None)
        if original is None:
            continue

        def wrapped(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if device.trace.instant is not Instant.GRADIENT_SYNC:
                device.enters(Instant.GRADIENT_SYNC)
            return _original(*args, **kwargs)

        setattr(optimizer, name, wrapped)


def run(case: Case, rank: int) -> dict[str, Any]:
    """Peaks of a step that is like all that follow.

    Returns:
        `instant_peaks`, `host_peaks`: bytes by instant; `live`: instant -> site -> bytes.
    """
    import deepspeed

    step, job = case.step, case.step.job
    followed = FOLLOWED_STEP[step.method]
    device = SimulatedDevice(step)
    gpu, host = SidedTrace(), SidedTrace()
    gpu.other, host.other = host, gpu
    device.trace = gpu
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(device.libraries())
        model, _ = build(case, whole=True)
        recorder = EngineRecorder(gpu, host, stack.enter_context(device.running()))
        stack.enter_context(engine_world(recorder, step.layout.num_gpus, rank))
        blocks = find_blocks(model)
        watch_blocks(blocks, entered=device.entered_block, reached=device.reached_block)
        materialise(model)
        with recorder:
            device.follow_weights(model, blocks)
            device.set_num_blocks(len(blocks))
            optimizer = optimizer_of(case, model, blocks)
            # It is where it belongs, and `Module.to` replaces no fake parameter.
            model.to = lambda *_, **__: model
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=config_of(case),
            )
            watch_sync(engine.optimizer, device)
            for number in range(1, followed + 1):
                device.step_begins(number)
                host.step = number
                _step(engine, device, job.grad_accum)
        answer = {
            **dict(zip(("instant_peaks", "live"), _peaks(gpu, followed), strict=True)),
            **dict(zip(("host_peaks", "host_live"), _peaks(host, followed), strict=True)),
            "host_pinned": _pinned(host),
        }
        engine.destroy()
    return answer


def _step(engine: Any, device: SimulatedDevice, grad_accum: int) -> None:
    device.enters(Instant.FORWARD_END)
    batches = [device.make_batch() for _ in range(grad_accum)]
    for batch in batches:
        device.enters(Instant.FORWARD_END)
        loss = engine(**batch)["loss"]
        device.enters(Instant.LOSS_BACKWARD)
        engine.backward(loss)
        loss = loss.detach()
        if batch is batches[-1]:
            device.enters(Instant.OPTIMIZER_STEP)
        engine.step()


def _peaks(trace: SidedTrace, step: int) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Largest live bytes of each instant of the last step, and by the sites that asked for them."""
    live: Counter[str] = Counter()
    total, peaks, columns = 0, {}, {}
    current: Any = None
    for entry in trace.entries:
        if entry.step == step and current is not entry.instant:
            current = entry.instant
            if total > peaks.get(current.value, -1):
                peaks[current.value], columns[current.value] = total, +live
        change = rounded(abs(entry.num_bytes)) * (1 if entry.num_bytes > 0 else -1)
        live[trace.sites.get(entry.block.number, "?")] += change
        total += change
        if entry.step == step and total > peaks[entry.instant.value]:
            peaks[entry.instant.value], columns[entry.instant.value] = total, +live
    if not peaks:
        return {"all": total}, {"all": dict(+live)}
    return peaks, {key: dict(value) for key, value in columns.items()}


def _pinned(trace: SidedTrace) -> list[int]:
    """Sizes of the page-locked buffers that are there after the last step."""
    sizes: dict[int, int] = {}
    for entry in trace.entries:
        if entry.block.owner is PINNED:
            sizes[entry.block.number] = sizes.get(entry.block.number, 0) + entry.num_bytes
    return sorted(size for size in sizes.values() if size)


def answer(raw: dict[str, Any]) -> Mapping[str, Any]:
    """The answer to one case."""
    rank = raw.pop("rank", 0)
    try:
        return run(parse_case(raw), rank)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def main() -> None:
    """Answer every line of stdin, each in a process of its own: the engine keeps global state."""
    out, sys.stdout = sys.stdout, sys.stderr
    importlib.import_module("deepspeed.runtime.zero.stage3")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
