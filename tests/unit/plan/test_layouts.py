"""Which methods with which degrees are compared, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given

from src.architecture import describe
from src.errors import UserError
from src.plan.layouts import candidates, tensor_parallel_degrees
from src.spec import Cluster, Layout, Method, Precision, Request
from tests.jobs import gpu, zoo_model
from tests.plan_requests import request_of
from tests.strategies import requests


def layouts(request: Request, method: Method) -> list[Layout]:
    found = candidates(request, describe(request.job.model))
    return [candidate.layout for candidate in found if candidate.method is method]


@given(request=requests())
def test_every_layout_uses_every_gpu_and_is_possible(request: Request) -> None:
    decoder = describe(request.job.model)
    found = candidates(request, decoder)
    assert len(set(found)) == len(found)
    for candidate in found:
        layout = candidate.layout
        assert layout.num_gpus == request.cluster.num_gpus
        assert (layout.tp > 1) == candidate.method.has_tensor_parallel
        assert decoder.attention.num_heads % layout.tp == 0
        assert decoder.attention.num_kv_heads % layout.tp == 0
        assert request.cluster.node_size % layout.tp == 0
        assert (candidate.method is Method.SINGLE) == (request.cluster.num_gpus == 1)
        if candidate.method is Method.HSDP:
            nodes = request.cluster.num_nodes
            assert layout.shard == (request.cluster.node_size if nodes > 1 else layout.dp // 2)
            continue
        sharded = candidate.method.is_zero or candidate.method.is_fsdp
        assert layout.shard == (layout.dp if sharded else 1)


@given(request=requests())
def test_each_kind_that_is_compared_can_be_asked_for_alone(request: Request) -> None:
    decoder = describe(request.job.model)
    found = candidates(request, decoder)
    for candidate in found:
        alone = Request(job=request.job, cluster=request.cluster, methods=(candidate.method,))
        mine = [other for other in found if other.method is candidate.method]
        assert list(candidates(alone, decoder)) == mine


@pytest.mark.parametrize(
    "method", [Method.DDP, Method.ZERO1, Method.ZERO2, Method.ZERO3, Method.FSDP, Method.FSDP_GRAD]
)
def test_data_parallelism_of_one_runs_where_it_is_asked_for(method: Method) -> None:
    assert layouts(request_of(gpus=1, methods=(method,)), method) == [Layout()]


def test_asked_methods_keep_their_order() -> None:
    asked = (Method.ZERO3, Method.DDP)
    found = candidates(request_of(methods=asked), describe(zoo_model("opt-1.3b")))
    assert tuple(candidate.method for candidate in found) == asked


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [
        (8, 8, [(4, 2), (2, 4)]),
        (16, 8, [(8, 2), (4, 4), (2, 8)]),
        (16, 2, [(8, 2)]),
        (6, 8, [(3, 2)]),  # 32 heads are not divided by 3
    ],
)
def test_tensor_parallelism_stays_within_a_node(
    gpus: int, per_node: int, expected: list[tuple[int, int]]
) -> None:
    request = request_of(gpus=gpus, gpus_per_node=per_node)
    for method in (Method.DDP_TP, Method.FSDP_TP):
        found = [(layout.dp, layout.tp) for layout in layouts(request, method)]
        assert found == expected


def test_tensor_parallelism_alone_needs_one_node() -> None:
    assert layouts(request_of(gpus=8), Method.TP) == [Layout(tp=8)]
    assert layouts(request_of(gpus=16), Method.TP) == []


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_two_nodes_have_the_degrees_of_one(per_node: int) -> None:
    decoder = describe(zoo_model("opt-1.3b"))
    one, two = (
        tensor_parallel_degrees(
            decoder, Cluster(gpu=gpu(), num_gpus=nodes * per_node, gpus_per_node=per_node)
        )
        for nodes in (1, 2)
    )
    assert one == two
    assert all(per_node % degree == 0 for degree in one)


def test_a_degree_asked_for_leaves_other_methods_out() -> None:
    request = request_of(gpus=8, tp=4)
    found = candidates(request, describe(request.job.model))
    assert {candidate.method for candidate in found} == {Method.DDP_TP, Method.FSDP_TP}
    assert {candidate.layout.tp for candidate in found} == {4}


def test_degree_one_is_no_tensor_parallelism() -> None:
    request = request_of(gpus=4, tp=1)
    found = candidates(request, describe(request.job.model))
    assert not any(candidate.method.has_tensor_parallel for candidate in found)
    assert len(found) == 7


@pytest.mark.parametrize("precision", Precision)
def test_pure_bf16_alone_is_not_for_deepspeed(precision: Precision) -> None:
    request = request_of(precision=precision)
    methods = {item.method for item in candidates(request, describe(request.job.model))}
    zero = {method for method in Method if method.is_zero}
    assert methods & zero == (set() if precision is Precision.BF16_TRUE else zero)


REFUSED = [
    ({"methods": (Method.SINGLE,), "gpus": 4}, "method", "single", "gpus=1 instead of gpus=4"),
    ({"methods": (Method.TP,), "gpus": 1}, "method", "tp", "needs 2 GPUs or more"),
    ({"methods": (Method.FSDP_TP,), "gpus": 1}, "method", "fsdp+tp", "method=single on one"),
    ({"methods": (Method.TP,), "gpus": 3}, "method", "tp", "divides the model's heads"),
    ({"methods": (Method.TP,), "gpus": 6}, "method", "tp", "possible degrees: 2"),
    ({"methods": (Method.FSDP_TP,), "gpus": 2}, "method", "fsdp+tp", "data-parallel replicas"),
    ({"methods": (Method.TP,), "gpus": 16}, "method", "tp", "one degree over all gpus=16"),
    ({"tp": 3, "gpus": 6}, "tp", 3, "possible: 1, 2"),
    ({"tp": 16, "gpus": 16}, "tp", 16, "a node of 8; possible: 1, 2, 4, 8"),
    ({"tp": 2, "gpus": 2, "methods": (Method.DDP_TP,)}, "method", "ddp+tp", "replicas"),
    (
        {"methods": (Method.ZERO1,), "precision": Precision.BF16_TRUE},
        "method",
        "zero1",
        "precision=bf16-mixed, fp16-mixed or fp32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "key", "value", "words"), REFUSED)
def test_a_refusal_names_key_value_and_what_is_allowed(
    keys: dict, key: str, value: object, words: str
) -> None:
    request = request_of(**keys)
    with pytest.raises(UserError) as caught:
        candidates(request, describe(request.job.model))
    assert (caught.value.key, caught.value.value) == (key, value)
    assert words in caught.value.allowed
    assert str(caught.value).startswith(f"{key}={value}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (lambda: request_of(gpus=0), "gpus", 0),
        (lambda: request_of(gpus=-4), "gpus", -4),
        (lambda: request_of(gpus=12), "gpus", 12),  # one node and a half
        (lambda: request_of(gpus_per_node=0), "gpus_per_node", 0),
        (lambda: request_of(micro_batch=0), "micro_batch", 0),
        (lambda: request_of(micro_batch=-1), "micro_batch", -1),
        (lambda: request_of(seq_len=0), "seq_len", 0),
        (lambda: request_of(grad_accum=0), "grad_accum", 0),
        (lambda: request_of(gpus=4, tp=8), "tp", 8),
        (lambda: request_of(tp=0), "tp", 0),
    ],
)
def test_impossible_numbers_are_refused_where_they_are_given(make, key: str, value: int) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert (caught.value.key, caught.value.value) == (key, value)


def test_a_model_whose_heads_are_not_known_is_not_split() -> None:
    request = request_of(gpus=4)
    methods = {candidate.method for candidate in candidates(request, None)}
    assert methods
    assert not any(method.has_tensor_parallel for method in methods)
    with pytest.raises(UserError, match="heads are known"):
        candidates(request_of(gpus=4, tp=2), None)
    with pytest.raises(UserError, match="heads are known"):
        candidates(request_of(gpus=4, methods=(Method.TP,)), None)
