"""More laws of every ledger: its shape in batch and sequence, what each method shares or shards."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from src.architecture import describe
from src.memory import (
    Instant,
    Term,
    columns,
    count_model,
    estimate_step,
    ledger_of,
    peak_allocated,
)
from src.memory.size import Shape
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    Job,
    Layout,
    Loss,
    Method,
    Optimizer,
    Step,
)
from tests.jobs import (
    CHECKPOINTINGS,
    LORA,
    SHARDED,
    gpu,
    is_covered,
    jobs,
    layout_of,
    small_model,
    step_of,
    steps,
    zoo_model,
)
from tests.small_configs import SMALL_CONFIGS
from tests.strategies import REAL_MODELS, lora, steps_of_method

ROUNDING = len(Term)
"""Cells are rounded to whole bytes one by one."""

KEPT = (
    Term.CHECKPOINTS,
    Term.SAVED_ACTIVATIONS,
    Term.DROPOUT_MASKS,
    Term.ATTENTION_SCORES,
)
SPLIT = (Term.WEIGHTS, Term.GRADIENTS, Term.OPTIMIZER_STATES, Term.OPTIMIZER_TEMPORARIES)
WINDOWLESS = tuple(name for name, config in SMALL_CONFIGS.items() if "sliding_window" not in config)


def peak(step: Step) -> int:
    return estimate_step(step).peak_bytes.allocated


def totals(step: Step) -> dict[Instant, int]:
    return {instant: sum(cells.values()) for instant, cells in ledger_of(step).items()}


def at(step: Step, **keys: object) -> Step:
    return replace(step, job=replace(step.job, **keys))


def fewest_sliced(step: Step) -> int:
    """Sequences from which on the loss does the same for each."""
    return 2 if step.job.loss is Loss.STANDARD_4X else 1


@given(step=steps())
def test_every_candidate_is_linear_in_the_micro_batch(step: Step) -> None:
    """From two sequences on where the loss copies shifted logits: a lone one's are not copied."""
    first = fewest_sliced(step)
    shapes = [Shape.of(first + more, step.job.seq_len) for more in (0, 1, 4)]
    for column in columns(step.job, step.method, step.layout, step.gpu):
        few, more, many = (column.size.at(shape) for shape in shapes)
        assert many == pytest.approx(few + 4 * (more - few))
        terms = [sum(size.at(shape) for size in column.terms.values()) for shape in shapes]
        assert terms == pytest.approx([few, more, many])
        assert all(coefficient >= 0 for size in column.terms.values() for coefficient in size)


@given(step=steps(), batch=st.integers(1, 50))
def test_a_column_rises_ever_faster_with_the_micro_batch(step: Step, batch: int) -> None:
    """The largest of linear candidates is convex; Liger's chunks grow in powers of two."""
    assume(step.job.loss is not Loss.LIGER)
    first = fewest_sliced(step) - 1 + batch
    low, middle, high = (totals(replace(step, micro_batch=first + more)) for more in (0, 1, 2))
    for instant in Instant:
        first, second = middle[instant] - low[instant], high[instant] - middle[instant]
        assert 0 <= first <= second + 2 * ROUNDING


@given(step=steps())
def test_the_fast_peak_is_the_ledgers(step: Step) -> None:
    fast = peak_allocated(
        step.job,
        step.method,
        step.layout,
        step.gpu,
        micro_batch=step.micro_batch,
        seq_len=step.job.seq_len,
    )
    assert fast == pytest.approx(peak(step), abs=ROUNDING)


@given(step=steps(), seq_lens=st.lists(st.integers(1, 64), min_size=1, max_size=5))
def test_arrays_of_both_letters_give_what_numbers_give(step: Step, seq_lens: list[int]) -> None:
    assume(step.job.model.name in WINDOWLESS and not step.job.sequence_parallel)
    batches = numpy.arange(1, 1 + len(seq_lens))
    many = peak_allocated(
        step.job,
        step.method,
        step.layout,
        step.gpu,
        micro_batch=batches[:, None],
        seq_len=numpy.array(seq_lens)[None, :],
    )
    assert many.shape == (len(seq_lens), len(seq_lens))
    for row, batch in enumerate(batches):
        each = [
            peak(at(replace(step, micro_batch=int(batch)), seq_len=seq_len)) for seq_len in seq_lens
        ]
        assert many[row].tolist() == pytest.approx(each, abs=ROUNDING)


@given(step=steps())
def test_the_same_question_has_the_same_answer(step: Step) -> None:
    assert estimate_step(step) == estimate_step(replace(step))


@given(step=steps(), finetune=lora(), more=st.integers(1, 64))
def test_a_higher_rank_never_needs_less(step: Step, finetune: Finetune, more: int) -> None:
    low = totals(at(step, finetune=finetune))
    high = totals(at(step, finetune=replace(finetune, r=finetune.r + more)))
    for instant in Instant:
        assert high[instant] >= low[instant] - ROUNDING


@pytest.mark.parametrize("rank", [1, 64])
@pytest.mark.parametrize("method", [Method.SINGLE, Method.DDP, Method.FSDP])
def test_the_rank_changes_nothing_but_what_adapters_have(rank: int, method: Method) -> None:
    job = Job(model=zoo_model("llama-3-8b"), finetune=LORA)
    step = step_of(job, method, gpus=1 if method is Method.SINGLE else 4, micro_batch=4)
    usual, other = (
        ledger_of(at(step, finetune=replace(LORA, r=r)))[Instant.LOSS_BACKWARD]
        for r in (LORA.r, rank)
    )
    changed = {term for term in Term if usual.get(term) != other.get(term)}
    mine = {Term.WEIGHTS, Term.OPTIMIZER_STATES, Term.GRADIENTS}
    buffers = Term.COMMUNICATION_BUFFERS if method is Method.DDP else Term.GATHERED_WEIGHTS
    assert changed <= mine | {buffers}
    assert sum(abs(usual.get(term, 0) - other.get(term, 0)) for term in changed) < 1 << 30


@given(step=steps())
def test_frozen_weights_have_neither_gradients_nor_states(step: Step) -> None:
    adapters = ledger_of(at(step, finetune=LORA))
    full = ledger_of(at(step, finetune=Finetune()))
    for instant in (Instant.FORWARD_END, Instant.OPTIMIZER_STEP):
        assert adapters[instant].get(Term.WEIGHTS, 0) >= full[instant].get(Term.WEIGHTS, 0)
    count = count_model(
        describe(step.job.model), finetune=LORA, tp=step.layout.tp, shard=step.layout.shard
    ).all
    states = adapters[Instant.OPTIMIZER_STEP].get(Term.OPTIMIZER_STATES, 0)
    per_parameter = 4 * step.job.optimizer.states_per_parameter
    whole = count.trained_shard if step.method.is_fsdp else count.trained / step.layout.shard
    assert states == pytest.approx(whole * per_parameter, abs=1)


@given(step=steps())
def test_terms_belong_to_methods(step: Step) -> None:
    every = {term for cells in ledger_of(step).values() for term in cells}
    method, layout = step.method, step.layout
    assert (Term.MASTER_WEIGHTS in every) == method.is_zero
    assert (Term.GATHERED_WEIGHTS in every) <= (method.is_fsdp or method is Method.ZERO3)
    buffers = method.is_zero or method.is_fsdp or method.has_ddp
    assert (Term.COMMUNICATION_BUFFERS in every) == buffers
    assert layout.num_gpus >= layout.shard
    copies = {
        instant for instant, cells in ledger_of(step).items() if Term.OPTIMIZER_TEMPORARIES in cells
    }
    assert copies <= {Instant.OPTIMIZER_STEP}
    if not method.is_zero:
        assert bool(copies) == (step.job.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_LOOP))


@given(step=steps())
def test_static_terms_stay_through_the_step(step: Step) -> None:
    ledger = ledger_of(step)
    for term in (
        Term.WEIGHTS,
        Term.MASTER_WEIGHTS,
        Term.OPTIMIZER_STATES,
        Term.INPUTS,
        Term.WORKSPACES,
    ):
        found = {ledger[instant].get(term) for instant in list(Instant)[1:]}
        assert len(found) == 1


@given(step=steps_of_method(Method.DDP), more=st.integers(1, 60))
def test_replicas_do_not_shrink_anything(step: Step, more: int) -> None:
    wider = replace(step, layout=Layout(dp=step.layout.dp + more))
    assert ledger_of(wider) == ledger_of(step)


@given(step=steps_of_method(Method.DDP_TP))
def test_ddp_is_one_gradient_sized_buffer_above_its_tensor_parallel_part(step: Step) -> None:
    alone = replace(step, method=Method.TP, layout=Layout(tp=step.layout.tp))
    with_ddp, without = ledger_of(step), ledger_of(alone)
    job = step.job
    count = count_model(describe(job.model), finetune=job.finetune, tp=step.layout.tp).all
    bytes_ = count.trained * (4 if job.finetune.is_lora else job.precision.weight_bytes)
    for instant in list(Instant)[1:]:
        cells = dict(with_ddp[instant])
        assert cells.pop(Term.COMMUNICATION_BUFFERS) == pytest.approx(bytes_, abs=1)
        assert cells == without[instant]


@given(job=jobs(), degree=st.sampled_from([2]))
def test_a_split_model_never_has_more_states(job: Job, degree: int) -> None:
    whole = ledger_of(step_of(job))
    split = ledger_of(step_of(job, Method.TP, gpus=degree))
    for term in SPLIT:
        assert split[Instant.OPTIMIZER_STEP].get(term, 0) <= whole[Instant.OPTIMIZER_STEP].get(
            term, 0
        )


@given(job=jobs(), method=st.sampled_from(SHARDED), gpus=st.integers(1, 16))
def test_more_shards_never_need_more(job: Job, method: Method, gpus: int) -> None:
    """From two on with DeepSpeed, which gathers and reduces nothing on one.

    Its stages 1 and 2 keep gradients of whole tensors, wherever a rank's run cuts them.
    """
    gpus *= 2 if method.is_zero else 1
    few, many = (totals(step_of(job, method, gpus=count)) for count in (gpus, 2 * gpus))
    whole = (Instant.GRADIENT_SYNC, Instant.OPTIMIZER_STEP) if method.is_zero else ()
    for instant in Instant:
        if instant not in whole:
            assert many[instant] <= few[instant] + ROUNDING


@given(job=jobs(), gpus=st.sampled_from([2, 4, 8]), batch=st.integers(1, 8))
def test_weights_kept_whole_never_need_less(job: Job, gpus: int, batch: int) -> None:
    resharded, kept = (
        peak(step_of(job, method, gpus=gpus, micro_batch=batch))
        for method in (Method.FSDP, Method.FSDP_GRAD)
    )
    assert kept >= resharded


@given(job=jobs(), batch=st.integers(1, 4))
def test_ddp_of_one_costs_its_buffer_and_nothing_else(job: Job, batch: int) -> None:
    single = step_of(job, micro_batch=batch)
    alone = ledger_of(replace(single, method=Method.DDP))
    for instant, cells in ledger_of(single).items():
        assert {
            term: cell
            for term, cell in alone[instant].items()
            if term is not Term.COMMUNICATION_BUFFERS
        } == cells


@given(job=jobs(), method=st.sampled_from(SHARDED), batch=st.integers(1, 4))
def test_sharding_over_one_gpu_saves_nothing(job: Job, method: Method, batch: int) -> None:
    """States of one GPU's only shard are at least those of no shards at all."""
    single = step_of(job, micro_batch=batch)
    alone = replace(single, method=method)
    for term in (Term.OPTIMIZER_STATES, Term.OPTIMIZER_TEMPORARIES):
        mine, whole = (
            ledger_of(step)[Instant.OPTIMIZER_STEP].get(term, 0) for step in (alone, single)
        )
        assert mine >= whole
    if method.is_fsdp:
        weights = (
            ledger_of(step)[Instant.OPTIMIZER_STEP][Term.WEIGHTS] for step in (alone, single)
        )
        assert next(weights) == next(weights)


@given(step=steps())
def test_recomputing_never_keeps_more_at_the_end_of_the_forward_pass(step: Step) -> None:
    step = at(step, finetune=Finetune())
    assume(is_covered(step))
    kept = {}
    for policy in CHECKPOINTINGS:
        cells = ledger_of(at(step, checkpointing=policy))[Instant.FORWARD_END]
        kept[policy] = sum(cells.get(term, 0) for term in KEPT)
    assert kept[Checkpointing.FULL] <= kept[Checkpointing.NONE]


@given(step=steps(), count=st.integers(2, 16))
def test_only_the_first_micro_steps_gradients_matter(step: Step, count: int) -> None:
    assert ledger_of(at(step, grad_accum=2)) == ledger_of(at(step, grad_accum=count))


@given(step=steps())
def test_a_smaller_state_never_needs_more(step: Step) -> None:
    order = (Optimizer.SGD, Optimizer.SGD_MOMENTUM, Optimizer.ADAMW_FUSED, Optimizer.ADAMW)
    peaks = [peak(at(step, optimizer=optimizer)) for optimizer in order]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("name", REAL_MODELS)
@pytest.mark.parametrize("attention", [Attention.FLASH, Attention.SDPA])
@pytest.mark.parametrize("seq_len", [256, 1024])
def test_scores_that_are_kept_need_more_than_a_fused_kernel(
    name: str, attention: Attention, seq_len: int
) -> None:
    job = Job(model=zoo_model(name), seq_len=seq_len, checkpointing=Checkpointing.NONE)
    fused, eager = (
        ledger_of(step_of(replace(job, attention=choice), micro_batch=2))[Instant.FORWARD_END]
        for choice in (attention, Attention.EAGER)
    )
    assert sum(eager.values()) > sum(fused.values())
    assert Term.ATTENTION_SCORES not in fused
    # fp32 softmax and its half-precision copy, of every head and block
    decoder = describe(job.model)
    scores = 2 * decoder.num_layers * decoder.attention.num_heads * seq_len**2
    assert eager[Term.ATTENTION_SCORES] >= 6 * scores


@pytest.mark.parametrize("sku", ["a100-80gb", "v100-16gb", "h100-80gb", "t4", "l4"])
@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_every_family_has_a_ledger_on_every_card_by_every_method(name: str, sku: str) -> None:
    job = Job(model=small_model(name), seq_len=16)
    for method in Method:
        step = Step(
            job=job, method=method, layout=layout_of(method, 4), gpu=gpu(sku), micro_batch=2
        )
        assert set(ledger_of(step)) == set(Instant)
