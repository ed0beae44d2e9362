"""Jobs, GPUs and steps for tests of the formula, and hypothesis strategies of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from src.architecture import describe
from src.architecture.losses import check_loss
from src.config.gpu import load_gpu
from src.config.zoo import load
from src.errors import NotCoveredError, UserError
from src.memory.columns import columns
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Gpu,
    Job,
    Layout,
    Loss,
    Method,
    Model,
    Optimizer,
    Precision,
    Step,
)
from tests.small_configs import SMALL_CONFIGS

LORA = Finetune(kind=FinetuneKind.LORA)
SHARDED = (Method.ZERO1, Method.ZERO2, Method.ZERO3, Method.FSDP, Method.FSDP_GRAD)


def gpu(sku: str = "a100-80gb") -> Gpu:
    """A GPU of conf."""
    return load_gpu(sku)


def zoo_model(name: str, **overrides: Any) -> Model:
    """A model of the zoo, with config fields changed."""
    entry = load("model", name)
    return Model(name=name, hf_id=entry["hf_id"], config={**entry["config"], **overrides})


def small_model(name: str, **overrides: Any) -> Model:
    """A model of a few thousand parameters."""
    return Model(name=name, hf_id=None, config={**SMALL_CONFIGS[name], **overrides})


def layout_of(method: Method, gpus: int) -> Layout:
    """A layout of a method over `gpus`: tensor parallelism in pairs."""
    if method is Method.SINGLE:
        return Layout()
    if method is Method.TP:
        return Layout(tp=gpus)
    tp = 2 if method.has_tensor_parallel else 1
    dp = gpus // tp
    shard = dp // 2 if method is Method.HSDP else dp
    return Layout(dp=dp, tp=tp, shard=1 if method.has_ddp else max(shard, 1))


def step_of(
    job: Job,
    method: Method = Method.SINGLE,
    *,
    gpus: int = 1,
    micro_batch: int = 1,
    sku: str = "a100-80gb",
) -> Step:
    """A step of a job."""
    return Step(
        job=job,
        method=method,
        layout=layout_of(method, gpus),
        gpu=gpu(sku),
        micro_batch=micro_batch,
    )


OPTIMIZERS = [
    Optimizer.ADAMW,
    Optimizer.ADAMW_FUSED,
    Optimizer.ADAMW_LOOP,
    Optimizer.SGD,
    Optimizer.SGD_MOMENTUM,
]
"""Those that run by every method."""


def losses_of(model: Model) -> list[Loss]:
    """The losses that the libraries have for a model."""
    found = []
    for loss in Loss:
        try:
            check_loss(model.model_type, loss)
        except NotCoveredError:
            continue
        found.append(loss)
    return found


CHECKPOINTINGS = [Checkpointing.NONE, Checkpointing.FULL, Checkpointing.SELECTIVE]


@st.composite
def jobs(draw: st.DrawFn, *, names: tuple[str, ...] = tuple(SMALL_CONFIGS)) -> Job:
    """Any job that the formula knows by every method, on a small model."""
    model = small_model(draw(st.sampled_from(names)))
    by_every_method = [
        precision
        for precision in Precision
        if precision is not Precision.BF16_TRUE or not describe(model).fp32_parameters
    ]
    return Job(
        model=model,
        finetune=draw(st.sampled_from([Finetune(), LORA])),
        seq_len=draw(st.integers(1, 64)),
        grad_accum=draw(st.sampled_from([1, 2])),
        precision=draw(st.sampled_from(by_every_method)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        checkpointing=draw(st.sampled_from(CHECKPOINTINGS)),
        checkpoint_every=draw(st.sampled_from([1, 2, 3])),
        attention=draw(st.sampled_from([Attention.SDPA, Attention.EAGER])),
        loss=draw(st.sampled_from(losses_of(model))),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any step of any job on any kind of GPU."""
    job = draw(jobs())
    method = draw(st.sampled_from(Method))
    gpus = 1 if method is Method.SINGLE else draw(st.sampled_from([2, 4]))
    if method in (Method.HSDP, Method.DDP_TP, Method.FSDP_TP):
        gpus = 4
    if method.has_tensor_parallel and draw(st.booleans()):
        job = replace(job, sequence_parallel=True, seq_len=gpus * job.seq_len)
    step = step_of(
        job,
        method,
        gpus=gpus,
        micro_batch=draw(st.integers(1, 8)),
        sku=draw(st.sampled_from(["a100-80gb", "v100-16gb", "h100-80gb"])),
    )
    assume(is_covered(step))
    return step


def is_covered(step: Step) -> bool:
    """Whether the formula answers."""
    try:
        columns(step.job, step.method, step.layout, step.gpu)
    except UserError:
        return False
    return True
