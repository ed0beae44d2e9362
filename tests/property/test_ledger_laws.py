"""What has to hold of every ledger, whatever the job."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.architecture import describe
from src.memory import Instant, Term, count_model, estimate_step, ledger_of, peak_allocated
from src.spec import Checkpointing, FinetuneKind, Job, Layout, Method, Step
from tests.jobs import (
    CHECKPOINTINGS,
    LORA,
    SHARDED,
    gpu,
    jobs,
    layout_of,
    small_model,
    step_of,
    steps,
)

settings.register_profile("laws", deadline=None, max_examples=120, derandomize=True)
settings.load_profile("laws")

DEEPENED = ("llama", "opt", "gpt2", "gpt_neox", "qwen2")
STATES = (Term.WEIGHTS, Term.MASTER_WEIGHTS, Term.OPTIMIZER_STATES, Term.GRADIENTS)


def peak(step: Step) -> int:
    return estimate_step(step).peak_bytes.allocated


@given(step=steps())
def test_the_peak_is_the_largest_column_and_cells_add_up_to_it(step: Step) -> None:
    estimate = estimate_step(step)
    totals = {instant: sum(cells.values()) for instant, cells in estimate.ledger.items()}
    assert list(totals) == list(Instant)
    assert estimate.peak_bytes.allocated == max(totals.values()) == totals[estimate.peak_instant]
    for cells in estimate.ledger.values():
        assert all(isinstance(cell, int) and cell > 0 for cell in cells.values())


@given(step=steps())
def test_levels_and_bounds_are_ordered(step: Step) -> None:
    estimate = estimate_step(step)
    for levels in (estimate.peak_bytes, estimate.upper_bytes):
        assert levels.allocated <= levels.reserved <= levels.device
    for level in ("allocated", "reserved", "device"):
        assert getattr(estimate.upper_bytes, level) >= getattr(estimate.peak_bytes, level)


@given(step=steps(), more=st.integers(1, 8))
def test_a_larger_micro_batch_never_needs_less(step: Step, more: int) -> None:
    assert peak(replace(step, micro_batch=step.micro_batch + more)) >= peak(step)


@given(step=steps(), more=st.integers(1, 64))
def test_a_longer_sequence_never_needs_less(step: Step, more: int) -> None:
    longer = replace(step.job, seq_len=step.job.seq_len + more * step.layout.tp)
    assert peak(replace(step, job=longer)) >= peak(step)


@given(
    job=jobs(names=("llama", "opt", "gpt2", "gpt_neox", "qwen2")), method=st.sampled_from(Method)
)
def test_more_layers_never_need_less(job: Job, method: Method) -> None:
    field = "n_layer" if job.model.name == "gpt2" else "num_hidden_layers"
    deeper = small_model(job.model.name, **{field: 5})
    gpus = 1 if method is Method.SINGLE else 4
    method = Method.DDP if method is Method.TP else method
    shallow, deep = (
        peak(step_of(replace(job, model=model), method, gpus=gpus)) for model in (job.model, deeper)
    )
    assert deep > shallow


@given(job=jobs(), method=st.sampled_from(SHARDED), gpus=st.integers(1, 16))
def test_more_shards_never_raise_a_sharded_term(job: Job, method: Method, gpus: int) -> None:
    few, many = (
        ledger_of(step_of(job, method, gpus=count))[Instant.OPTIMIZER_STEP]
        for count in (gpus, gpus + 1)
    )
    # DeepSpeed's stages 1 and 2 keep gradients of whole tensors, wherever a run cuts them.
    for term in STATES if method.is_fsdp else set(STATES) - {Term.GRADIENTS}:
        assert many.get(term, 0) <= few.get(term, 0)


@given(job=jobs())
def test_tensor_parallelism_never_raises_weights(job: Job) -> None:
    whole = ledger_of(step_of(job))[Instant.LOAD]
    split = ledger_of(step_of(job, Method.TP, gpus=2))[Instant.LOAD]
    assert split[Term.WEIGHTS] <= whole[Term.WEIGHTS]


@given(job=jobs(), micro_batch=st.integers(1, 4))
def test_ddp_is_one_gradient_sized_buffer_above_single(job: Job, micro_batch: int) -> None:
    counts = count_model(describe(job.model), finetune=job.finetune).all
    bytes_ = 4 if job.finetune.is_lora else job.precision.weight_bytes
    single = step_of(job, micro_batch=micro_batch)
    ddp = step_of(job, Method.DDP, gpus=4, micro_batch=micro_batch)
    assert peak(ddp) - peak(single) == pytest.approx(counts.trained * bytes_, abs=2)


@given(job=jobs(), method=st.sampled_from([Method.FSDP, Method.FSDP_GRAD]))
def test_sharding_over_one_gpu_keeps_the_states_of_single(job: Job, method: Method) -> None:
    alone = ledger_of(replace(step_of(job), method=method, layout=Layout()))
    single = ledger_of(step_of(job))
    for term in (Term.WEIGHTS, Term.OPTIMIZER_STATES):
        assert alone[Instant.OPTIMIZER_STEP].get(term) == single[Instant.OPTIMIZER_STEP].get(term)


@given(job=jobs(), method=st.sampled_from(Method))
def test_lora_never_keeps_more_gradients_or_states(job: Job, method: Method) -> None:
    method = Method.DDP if method is Method.TP else method
    gpus = 1 if method is Method.SINGLE else 4
    full = replace(job, finetune=replace(LORA, kind=FinetuneKind.FULL))
    lora = replace(job, finetune=replace(LORA, r=1))
    ledgers = [ledger_of(step_of(one, method, gpus=gpus)) for one in (lora, full)]
    for term in (Term.GRADIENTS, Term.OPTIMIZER_STATES, Term.OPTIMIZER_TEMPORARIES):
        adapted, whole = (ledger[Instant.OPTIMIZER_STEP].get(term, 0) for ledger in ledgers)
        assert adapted <= whole or whole == 0


@given(step=steps())
def test_accumulating_never_lowers_the_peak(step: Step) -> None:
    once = replace(step, job=replace(step.job, grad_accum=1))
    twice = replace(step, job=replace(step.job, grad_accum=2))
    assert peak(twice) >= peak(once)


@given(step=steps())
def test_checkpointing_never_keeps_more_of_the_forward_pass(step: Step) -> None:
    kept = {}
    for policy in CHECKPOINTINGS:
        job = replace(
            step.job, checkpointing=policy, finetune=replace(LORA, kind=FinetuneKind.FULL)
        )
        cells = ledger_of(replace(step, job=job))[Instant.LOSS_BACKWARD]
        terms = (
            Term.CHECKPOINTS,
            Term.SAVED_ACTIVATIONS,
            Term.DROPOUT_MASKS,
            Term.ATTENTION_SCORES,
            Term.CAST_WEIGHTS,
        )
        kept[policy] = sum(cells.get(term, 0) for term in terms)
    assert kept[Checkpointing.FULL] <= kept[Checkpointing.NONE]


@given(job=jobs(), method=st.sampled_from([Method.SINGLE, Method.DDP, Method.FSDP, Method.ZERO3]))
def test_arrays_give_what_numbers_give(job: Job, method: Method) -> None:
    layout = layout_of(method, 1 if method is Method.SINGLE else 4)
    batches, lengths = numpy.array([1, 3, 8, 2]), numpy.array([job.seq_len] * 4)
    many = peak_allocated(job, method, layout, gpu(), micro_batch=batches, seq_len=lengths)
    each = [
        peak_allocated(job, method, layout, gpu(), micro_batch=int(batch), seq_len=job.seq_len)
        for batch in batches
    ]
    assert many == pytest.approx(each)
