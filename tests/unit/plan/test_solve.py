"""One field left open: searches against brute force, and what is told of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from src.config.gpu import every_gpu
from src.errors import UserError
from src.memory import estimate_step
from src.plan.layouts import candidates
from src.plan.search import largest_that_fits, verdict
from src.plan.solve import (
    MOST_GPUS_EACH,
    cluster_sizes,
    compare_solved,
    solve,
    with_solution,
)
from src.spec import (
    Checkpointing,
    EstimatorKind,
    Method,
    Optimizer,
    Precision,
    Request,
    Step,
    Unknown,
    Verdict,
)
from tests.jobs import LORA, gpu
from tests.plan_requests import request_of


def fits(request: Request, method: Method) -> bool:
    """Whether any layout of a method fits, asked one by one."""
    from src.architecture import describe

    try:
        found = candidates(replace(request, methods=(method,)), describe(request.job.model))
    except UserError:
        return False
    steps = [
        Step(
            job=request.job,
            method=item.method,
            layout=item.layout,
            gpu=request.cluster.gpu,
            micro_batch=request.micro_batch or 1,
        )
        for item in found
    ]
    return any(verdict(estimate_step(step), step.gpu) is Verdict.FITS for step in steps)


def random_request(draw: random.Random) -> Request:
    return request_of(
        draw.choice(["opt-125m", "opt-1.3b", "gpt2", "qwen2.5-0.5b", "llama-2-7b"]),
        draw.choice([1, 2, 4]),
        sku=draw.choice(["t4", "v100-16gb", "a100-40gb", "rtx-3090"]),
        precision=draw.choice(list(Precision)),
        optimizer=draw.choice([Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD]),
        checkpointing=draw.choice([Checkpointing.NONE, Checkpointing.FULL]),
        seq_len=draw.choice([128, 512, 1024]),
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 64, 100])
def test_the_search_finds_every_threshold(limit: int) -> None:
    for threshold in range(limit + 2):
        found = largest_that_fits(lambda value, t=threshold: value <= t, limit)
        assert found == min(threshold, limit)


@pytest.mark.parametrize("seed", range(200))
def test_searches_agree_with_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    request = random_request(draw)
    key = draw.choice([Unknown.MICRO_BATCH, Unknown.SEQ_LEN])
    if key is Unknown.SEQ_LEN:
        request = replace(request, micro_batch=draw.choice([1, 4]))
    for found in solve(key, request, estimate_step, [request.cluster.gpu]).solutions:
        values = [found.value] if found.value is not None else []
        for value, expected in [*((v, True) for v in values), ((found.value or 0) + 1, False)]:
            if found.is_limit and not expected:
                continue
            filled = with_solution(request, key, replace(found, value=value), request.cluster.gpu)
            step = Step(
                job=filled.job,
                method=found.method,
                layout=found.layout,
                gpu=filled.cluster.gpu,
                micro_batch=filled.micro_batch or 1,
            )
            assert (verdict(estimate_step(step), step.gpu) is Verdict.FITS) == expected


@pytest.mark.parametrize("seed", range(12))
def test_fewest_gpus_agree_with_trying_every_size(seed: int) -> None:
    request = random_request(random.Random(seed))
    for found in solve(Unknown.GPUS, request, estimate_step, [request.cluster.gpu]).solutions:
        sizes = cluster_sizes(request.cluster.gpus_per_node, 64)
        brute = next(
            (
                size
                for size in sizes
                if (size > 1 or found.method is Method.SINGLE)
                and fits(
                    replace(request, cluster=replace(request.cluster, num_gpus=size)), found.method
                )
            ),
            None,
        )
        if found.value is None:
            assert brute is None
        elif found.value <= 64:
            assert found.value == brute


def test_each_gpu_is_told_with_how_many_it_takes() -> None:
    request = request_of("llama-2-7b", 1)
    solved = solve(Unknown.GPU, request, estimate_step, every_gpu())
    assert {found.gpu for found in solved.solutions} == {item.sku for item in every_gpu()}
    counts = [found.value or MOST_GPUS_EACH + 1 for found in solved.solutions]
    assert counts == sorted(counts)
    for found in solved.solutions[::6]:
        if found.value is None:
            continue
        filled = with_solution(request, Unknown.GPU, found, gpu(found.gpu))
        assert fits(filled, found.method)
        if found.value > 1:
            sizes = cluster_sizes(filled.cluster.gpus_per_node, MOST_GPUS_EACH)
            fewer = sizes[sizes.index(found.value) - 1]
            cluster = replace(filled.cluster, num_gpus=fewer)
            assert not any(fits(replace(filled, cluster=cluster), method) for method in Method)


def test_a_longer_rank_takes_more_and_needs_adapters() -> None:
    lora = request_of("opt-1.3b", 1, finetune=LORA, solve=Unknown.LORA_R, sku="t4")
    report = compare_solved(lora, estimate_step, [gpu("t4")], kind=EstimatorKind.FORMULA)
    assert report.solved is not None
    assert report.solved.best is not None
    assert report.request.job.finetune.r == report.solved.best.value
    assert report.methods[0].verdict is Verdict.FITS
    with pytest.raises(UserError, match="solve=lora_r"):
        solve(Unknown.LORA_R, request_of(), estimate_step, [])


def test_a_table_of_positions_ends_the_search() -> None:
    solved = solve(Unknown.SEQ_LEN, request_of("opt-125m", 1), estimate_step, [])
    assert solved.best is not None
    assert (solved.best.value, solved.best.is_limit) == (2048, True)


def test_where_nothing_fits_the_request_is_compared_as_it_stands() -> None:
    request = request_of("llama-2-70b", 1, sku="t4", solve=Unknown.SEQ_LEN)
    report = compare_solved(request, estimate_step, [gpu("t4")], kind=EstimatorKind.FORMULA)
    assert report.solved is not None
    assert report.solved.best is None
    assert report.request == request
    assert report.recommended is None
