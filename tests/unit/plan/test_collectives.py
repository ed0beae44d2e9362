"""Seconds of collectives, counted by hand, and of steps whose kernels are shorter than a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.architecture import describe
from src.plan.collectives import Group, gather_seconds, link_bytes_per_second, reduce_seconds
from src.plan.throughput import LAUNCH_SECONDS, step_time
from src.spec import Cluster, Job, Layout, Method, Step
from tests.jobs import gpu, step_of, zoo_model

NODES = Cluster(gpu=gpu("a100-80gb"), num_gpus=64, gpus_per_node=8, internode_gbps=25.0)
"""NVLink of 300 GB/s, eight networks of 25 GB/s a node."""
JOB = Job(model=zoo_model("opt-1.3b"))


def test_a_gather_within_a_node() -> None:
    seconds = gather_seconds(NODES, 8e9, Group(ranks=8, span=8), count=10)
    assert seconds == pytest.approx(8e9 * 7 / 8 / (300e9 * 0.7) + 10 * (8.4e-6 + 7 * 3.4e-6))


def test_a_gather_over_nodes_has_the_network_of_all_its_ranks_of_a_node() -> None:
    seconds = gather_seconds(NODES, 8e9, Group(ranks=64, span=64), count=1)
    moved = 8e9 * 63 / 64 / (8 * 25e9 * 0.7)
    assert seconds == pytest.approx(moved + 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6)


def test_one_rank_a_node_has_its_own_network_alone() -> None:
    seconds = reduce_seconds(NODES, 1e9, Group(ranks=8, span=64), count=1)
    assert seconds == pytest.approx(2 * 1e9 * 7 / 8 / (25e9 * 0.7) + 8.4e-6 + 2 * 3 * 14e-6)


def test_a_network_faster_than_the_node_is_no_faster_than_the_node() -> None:
    fast = replace(NODES, internode_gbps=1000.0)
    assert link_bytes_per_second(fast, within_node=False, per_node=8) == link_bytes_per_second(
        fast, within_node=True
    )


def test_a_large_all_reduce_takes_a_tree_and_a_gather_cannot() -> None:
    large = replace(NODES, num_gpus=16_384)
    everyone = Group(ranks=16_384, span=16_384)
    assert reduce_seconds(large, 0.0, everyone, count=1) == pytest.approx(
        8.4e-6 + 2 * (7 * 3.4e-6 + 11 * 14e-6)
    )
    assert gather_seconds(large, 0.0, everyone, count=1) == pytest.approx(
        8.4e-6 + (16_384 - 2048) * 3.4e-6 + 2047 * 14e-6
    )


def test_one_rank_sends_nothing() -> None:
    alone = Group(ranks=1, span=8)
    assert gather_seconds(NODES, 1e9, alone, count=9) == 0
    assert reduce_seconds(NODES, 1e9, alone, count=9) == 0


@given(
    ranks=st.sampled_from([2, 4, 8, 16, 64]),
    num_bytes=st.floats(0, 1e12),
    slower=st.floats(0.01, 1.0),
)
def test_more_bytes_and_slower_links_never_take_less(
    ranks: int, num_bytes: float, slower: float
) -> None:
    group = Group(ranks=ranks, span=ranks)
    card = replace(NODES.gpu, link_gbps=NODES.gpu.link_gbps * slower)
    worse = replace(NODES, gpu=card, internode_gbps=25.0 * slower)
    for seconds in (gather_seconds, reduce_seconds):
        usual = seconds(NODES, num_bytes, group, count=1)
        assert usual <= seconds(worse, num_bytes, group, count=1)
        assert usual <= seconds(NODES, 2 * num_bytes, group, count=1)


def test_sharding_over_every_gpu_of_a_large_cluster_waits_for_its_rings() -> None:
    cluster = replace(NODES, num_gpus=16_384)

    def exposed(method: Method, shard: int) -> float:
        step = Step(
            job=JOB,
            method=method,
            layout=Layout(dp=16_384, shard=shard),
            gpu=cluster.gpu,
            micro_batch=4,
        )
        return step_time(step, cluster, describe(JOB.model)).exposed

    assert exposed(Method.FSDP, 16_384) > 5 > exposed(Method.HSDP, 8)


def test_tiny_batches_wait_for_the_host_and_large_ones_do_not() -> None:
    tiny = replace(JOB, seq_len=1)
    decoder = describe(JOB.model)
    one, large = (
        step_time(step_of(job, micro_batch=batch), replace(NODES, num_gpus=1), decoder)
        for job, batch in ((tiny, 1), (JOB, 16))
    )
    parts = (decoder.stem, *decoder.blocks, decoder.tail, decoder.head)
    host = 4 * LAUNCH_SECONDS * sum(len(part.ops) for part in parts)
    waits = max(0.0, host - one.compute - one.traffic)
    assert one.launch == pytest.approx(waits)
    assert large.launch == 0
