"""Hypothesis strategies beyond those of `tests.jobs`: sizes, shapes, clusters, whole requests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from src.memory.size import Shape, Size
from src.spec import (
    Cluster,
    Finetune,
    FinetuneKind,
    Job,
    Method,
    Precision,
    Request,
    Step,
)
from tests.jobs import OPTIMIZERS, gpu, jobs, step_of, zoo_model

CARDS = ("a100-80gb", "v100-16gb", "h100-80gb")
REAL_MODELS = ("opt-125m", "opt-1.3b", "gpt2", "pythia-160m", "qwen2.5-0.5b", "gemma-2b")
"""Models of the zoo that need bytes worth speaking of and still describe fast."""

COEFFICIENTS = st.integers(0, 1 << 40)


@st.composite
def sizes(draw: st.DrawFn) -> Size:
    """Any size, of whole coefficients."""
    return Size(*(draw(COEFFICIENTS) for _ in Size._fields))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any shape."""
    return Shape.of(draw(st.integers(1, 64)), draw(st.integers(1, 4096)))


@st.composite
def lora(draw: st.DrawFn) -> Finetune:
    """Any LoRA that fits every model."""
    return Finetune(
        kind=FinetuneKind.LORA,
        r=draw(st.integers(1, 64)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        targets=draw(st.sampled_from([(), ("all-linear",)])),
    )


@st.composite
def steps_of_method(draw: st.DrawFn, method: Method, *, gpus: int = 4) -> Step:
    """A step of a small model by one method."""
    return step_of(
        draw(jobs()),
        method,
        gpus=1 if method is Method.SINGLE else gpus,
        micro_batch=draw(st.integers(1, 8)),
        sku=draw(st.sampled_from(CARDS)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One node, part of one, or two."""
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    num_gpus = draw(st.sampled_from([*range(1, per_node + 1), 2 * per_node]))
    return Cluster(gpu=gpu(draw(st.sampled_from(CARDS))), num_gpus=num_gpus, gpus_per_node=per_node)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request about a real model that is possible: every method is compared."""
    job = Job(
        model=zoo_model(draw(st.sampled_from(REAL_MODELS))),
        finetune=draw(st.one_of(st.just(Finetune()), lora())),
        seq_len=draw(st.sampled_from([128, 512, 1024])),
        precision=draw(st.sampled_from(Precision)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
    )
    request = Request(job=job, cluster=draw(clusters()))
    return replace(request, micro_batch=draw(st.sampled_from([None, None, 1, 4, 64])))
