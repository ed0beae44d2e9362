"""The model of speed: what makes a step longer, and the rankings that were measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from src.architecture import describe
from src.memory import host_activation_bytes
from src.plan.collectives import link_bytes_per_second
from src.plan.throughput import (
    HOST_BANDWIDTH,
    StepTime,
    forward_flops_per_token,
    matmul_flops,
    step_time,
    tokens_per_second,
)
from src.spec import Checkpointing, Cluster, Job, Layout, Method, Optimizer, Precision, Step
from tests.jobs import LORA, gpu, layout_of, step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"), precision=Precision.FP16_MIXED)


def cluster(sku: str = "a100-80gb", gpus: int = 4, per_node: int = 8) -> Cluster:
    return Cluster(gpu=gpu(sku), num_gpus=gpus, gpus_per_node=per_node)


def time_of(job: Job, method: Method = Method.SINGLE, **keys) -> StepTime:
    gpus = keys.pop("gpus", 1 if method is Method.SINGLE else 4)
    per_node = keys.pop("per_node", 8)
    step = step_of(job, method, gpus=gpus, **keys)
    return step_time(step, cluster(gpus=gpus, per_node=per_node), describe(job.model))


def test_seconds_are_the_sum_of_the_parts() -> None:
    times = time_of(JOB, Method.FSDP)
    parts = (times.compute, times.traffic, times.optimizer, times.exposed, times.launch)
    assert times.seconds == pytest.approx(sum(parts))
    assert min(parts) >= 0


def test_one_gpu_communicates_nothing() -> None:
    for method in (Method.SINGLE, Method.DDP, Method.FSDP, Method.ZERO3):
        assert time_of(JOB, method, gpus=1).exposed == 0


@pytest.mark.parametrize("method", [Method.DDP, Method.FSDP, Method.ZERO3, Method.TP])
def test_a_slower_link_is_never_faster(method: Method) -> None:
    decoder = describe(JOB.model)
    step = step_of(JOB, method, gpus=4)
    times = [
        step_time(replace(step, gpu=card.gpu), card, decoder).exposed
        for card in (
            replace(cluster(), gpu=replace(gpu(), link_gbps=gbps)) for gbps in (300.0, 30.0, 3.0)
        )
    ]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_between_nodes_the_network_is_the_link() -> None:
    card = replace(cluster(gpus=16), internode_gbps=10.0)
    assert link_bytes_per_second(card, within_node=False) == pytest.approx(7e9)
    assert time_of(JOB, Method.DDP, gpus=16).exposed > time_of(JOB, Method.DDP, gpus=8).exposed


@pytest.mark.parametrize(
    ("precision", "sku", "tflops"),
    [
        (Precision.FP32, "a100-80gb", 19.5),  # TF32 is off by default
        (Precision.BF16_MIXED, "a100-80gb", 312.0),
        (Precision.BF16_TRUE, "a100-80gb", 312.0),
        (Precision.FP16_MIXED, "v100-16gb", 125.0),
    ],
)
def test_rates_of_dense_matrix_multiplies(precision: Precision, sku: str, tflops: float) -> None:
    assert matmul_flops(gpu(sku), precision) == pytest.approx(tflops * 1e12, rel=0.01)


def test_bf16_without_units_is_as_slow_as_fp32() -> None:
    card = gpu("v100-16gb")
    assert card.bf16_tflops is None
    assert matmul_flops(card, Precision.BF16_TRUE) == matmul_flops(card, Precision.FP32)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_more_states_take_the_optimizer_longer(optimizer: Optimizer) -> None:
    sgd = time_of(replace(JOB, optimizer=Optimizer.SGD)).optimizer
    this = time_of(replace(JOB, optimizer=optimizer)).optimizer
    assert (this > sgd) == (optimizer.states_per_parameter > 0)


def test_recomputing_costs_a_third_more_and_lora_saves_one_pass() -> None:
    none = replace(JOB, checkpointing=Checkpointing.NONE)
    assert time_of(JOB).compute / time_of(none).compute == pytest.approx(4 / 3)
    lora = replace(none, finetune=LORA)
    assert time_of(lora).compute / time_of(none).compute == pytest.approx(2 / 3)


def test_micro_steps_repeat_all_but_the_optimizer() -> None:
    once, four = time_of(JOB), time_of(replace(JOB, grad_accum=4))
    assert four.compute == pytest.approx(4 * once.compute)
    assert four.traffic == pytest.approx(4 * once.traffic)
    assert four.optimizer == once.optimizer


def test_experts_cost_what_a_token_visits() -> None:
    few, all_ = (zoo_model("mixtral-8x7b", num_experts_per_tok=count) for count in (2, 8))
    flops = [
        forward_flops_per_token(describe(model), Job(model=model, seq_len=1))
        for model in (few, all_)
    ]
    expert = 2 * 3 * 4096 * 14336 * 32
    assert flops[1] - flops[0] == pytest.approx(6 * expert)


def test_tokens_are_those_of_all_replicas_and_micro_steps() -> None:
    job = replace(JOB, grad_accum=2)
    step = step_of(job, Method.DDP_TP, gpus=4, micro_batch=3)
    decoder = describe(job.model)
    seconds = step_time(step, cluster(), decoder).seconds
    speed = tokens_per_second(step, cluster(), decoder)
    assert speed * seconds == pytest.approx(2 * 3 * 512 * 2)


@pytest.mark.parametrize("name", ["opt-1.3b", "bloom-1b1", "gpt-neo-1.3b"])
def test_four_v100_are_fastest_with_data_parallelism(name: str) -> None:
    """LLMem (arXiv 2404.10933) measured 4DP < 2DP+2TP < 4TP in seconds for each, states sharded."""
    card = cluster("v100-16gb-pcie", per_node=4)
    job = replace(JOB, model=zoo_model(name))
    decoder = describe(job.model)

    def speed(method: Method) -> float:
        step = Step(
            job=job, method=method, layout=layout_of(method, 4), gpu=card.gpu, micro_batch=4
        )
        return tokens_per_second(step, card, decoder)

    assert speed(Method.FSDP) > speed(Method.FSDP_TP) > speed(Method.TP)


def test_activations_in_host_memory_cost_their_way_there_and_back() -> None:
    kept = replace(JOB, checkpointing=Checkpointing.NONE)
    moved = replace(kept, activation_offload=True)
    step = step_of(moved, Method.SINGLE, gpus=1)
    num_bytes = host_activation_bytes(step)
    assert num_bytes > 1e8
    assert host_activation_bytes(replace(step, job=kept)) == 0
    cost = time_of(moved).traffic - time_of(kept).traffic
    assert cost == pytest.approx(2 * num_bytes / HOST_BANDWIDTH)
    assert time_of(replace(moved, grad_accum=3)).traffic == pytest.approx(
        3 * time_of(moved).traffic
    )


def test_groups_of_shards_gather_within_themselves() -> None:
    """Over a slow network a node's shards and replicas of nodes beat one group over all."""
    many = replace(cluster(gpus=64), internode_gbps=1.0)
    decoder = describe(JOB.model)
    step = step_of(JOB, Method.FSDP, gpus=64)
    hybrid = replace(step, method=Method.HSDP, layout=Layout(dp=64, shard=8))
    whole = replace(step, method=Method.HSDP, layout=Layout(dp=64, shard=32))
    fsdp, near, far = (step_time(one, many, decoder).exposed for one in (step, hybrid, whole))
    assert near < fsdp
    assert near < far
    assert (
        step_time(replace(hybrid, gpu=gpu()), replace(many, internode_gbps=0.5), decoder).exposed
        > near
    )


def test_micro_batches_may_be_an_array() -> None:
    decoder = describe(JOB.model)
    batches = np.array([1, 3, 8])
    for method in (Method.FSDP, Method.TP, Method.DDP):
        step = step_of(JOB, method, gpus=4)
        found = step_time(step, cluster(), decoder, micro_batch=batches).seconds
        one_by_one = [
            step_time(replace(step, micro_batch=batch), cluster(), decoder).seconds
            for batch in batches.tolist()
        ]
        assert found.tolist() == pytest.approx(one_by_one)
