"""What holds of every answer: the search, the verdicts, the changes, the ranking."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from src.architecture import describe
from src.memory import estimate_step
from src.plan import compare, largest_micro_batch, verdict
from src.plan.advice import advise
from src.plan.changes import leaner
from src.plan.search import with_micro_batch
from src.plan.throughput import step_time, tokens_per_second
from src.spec import (
    Checkpointing,
    Cluster,
    FinetuneKind,
    Gpu,
    Job,
    Method,
    Request,
    Step,
    Verdict,
)
from tests.jobs import gpu, jobs, steps, zoo_model
from tests.strategies import REAL_MODELS, requests

FEW = settings(max_examples=25)


def room(step: Step, gib: float) -> Step:
    """The step on a card of another capacity."""
    card: Gpu = replace(step.gpu, usable_gib=gib)
    return replace(step, gpu=card)


@given(step=steps(), extra_kib=st.integers(0, 2000))
def test_the_largest_micro_batch_is_the_last_of_those_that_fit(step: Step, extra_kib: int) -> None:
    """On cards just large enough for few sequences of a small model."""
    least = estimate_step(with_micro_batch(step, 1)).upper_bytes.device
    step = room(step, (least + extra_kib * 1024) / 2**30)
    counted = 0
    while counted < 300:
        trial = with_micro_batch(step, counted + 1)
        if verdict(estimate_step(trial), step.gpu) is not Verdict.FITS:
            break
        counted += 1
    found = largest_micro_batch(step, estimate_step)
    assert found == counted or (counted == 300 and found >= 300)


@FEW
@given(step=steps(), gib=st.floats(1, 100))
def test_a_larger_card_never_takes_less(step: Step, gib: float) -> None:
    small, large = (
        largest_micro_batch(room(step, size), estimate_step) for size in (gib, 1.5 * gib)
    )
    assert small <= large


@FEW
@given(step=steps(), batch=st.integers(1, 64))
def test_verdicts_never_get_better_with_the_micro_batch(step: Step, batch: int) -> None:
    step = room(step, 2.5)
    order = list(Verdict)
    low, high = (
        order.index(verdict(estimate_step(with_micro_batch(step, size)), step.gpu))
        for size in (batch, 2 * batch)
    )
    assert low <= high


@FEW
@given(request=requests())
def test_a_change_that_is_told_makes_something_fit(
    request: Request,
) -> None:
    card = replace(request.cluster.gpu, usable_gib=6.0)
    request = replace(request, cluster=replace(request.cluster, gpu=card))
    if compare(request).recommended is not None:
        return
    changes = {change.words: change.request for change in leaner(request)}
    for advice in advise(request, estimate_step):
        if advice.verdict is Verdict.FITS and advice.changes in changes:
            changed = replace(changes[advice.changes], micro_batch=request.micro_batch)
            smaller = "micro_batch" in advice.changes
            followed = compare(changes[advice.changes] if smaller else changed)
            assert followed.recommended is not None


@FEW
@given(request=requests())
def test_one_method_asked_for_has_the_row_that_it_has_among_all(request: Request) -> None:
    every = compare(request)
    method = every.methods[-1].method
    alone = compare(replace(request, methods=(method,)))
    assert sorted(alone.methods, key=repr) == sorted(
        (row for row in every.methods if row.method is method), key=repr
    )


@FEW
@given(request=requests())
def test_the_recommended_is_within_the_tie_of_the_fastest_that_fits(request: Request) -> None:
    report = compare(request)
    fitting = [row for row in report.methods if row.verdict is Verdict.FITS]
    if fitting:
        best = max(row.tokens_per_second or 0.0 for row in fitting)
        assert (report.methods[0].tokens_per_second or 0.0) >= 0.98 * best


@given(job=jobs(), method=st.sampled_from(Method), batch=st.integers(1, 32))
def test_more_tokens_take_longer_and_pass_faster(job: Job, method: Method, batch: int) -> None:
    from tests.jobs import step_of

    gpus = 1 if method is Method.SINGLE else 4
    cluster = Cluster(gpu=gpu(), num_gpus=gpus, gpus_per_node=8)
    decoder = describe(job.model)
    one, two = (step_of(job, method, gpus=gpus, micro_batch=size) for size in (batch, 2 * batch))
    seconds = [step_time(step, cluster, decoder).seconds for step in (one, two)]
    speeds = [tokens_per_second(step, cluster, decoder) for step in (one, two)]
    assert 0 < seconds[0] <= seconds[1] * (1 + 1e-12)
    assert 0 < speeds[0] <= speeds[1] * (1 + 1e-9)


@FEW
@given(name=st.sampled_from(REAL_MODELS), request=requests())
def test_recomputing_and_adapters_never_lower_the_largest_micro_batch(
    name: str, request: Request
) -> None:
    kept = replace(
        request,
        micro_batch=None,
        job=replace(request.job, model=zoo_model(name), checkpointing=Checkpointing.NONE),
    )
    recomputed = replace(kept, job=replace(kept.job, checkpointing=Checkpointing.FULL))
    rows = [
        {(row.method, row.layout): row.max_micro_batch for row in compare(asked).methods}
        for asked in (kept, recomputed)
    ]
    assert rows[0].keys() == rows[1].keys()
    for key, largest in rows[0].items():
        assert largest <= rows[1][key]
    assert kept.job.finetune.kind in FinetuneKind
