"""Seconds of collectives: bytes over the slowest link of a ring, and what every hop of it takes.

Letters: R ranks of a group, n nodes that it spans, V bytes of what is gathered or reduced.

| collective | bytes through every link | hops |
|---|---|---|
| all-gather, reduce-scatter | `V*(R-1)/R` | ring: `R-1`, of them `n-1` between nodes |
| all-reduce | `2*V*(R-1)/R` | ring: twice those; tree: `2*(R/n-1)`, `2*log2(n)` between nodes |
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any, NamedTuple

from src.spec import Cluster, Interconnect

LINK_EFFICIENCY = 0.7
"""Share of a link's bandwidth that a collective reaches."""

PCIE_SHARING = 0.5
"""Collectives over PCIe cross the host bridge twice."""

START_SECONDS = 8.4e-6
NETWORK_HOP_SECONDS = 14.0e-6
HOP_SECONDS = {
    Interconnect.NVLINK: 3.4e-6,
    Interconnect.XGMI: 3.4e-6,
    Interconnect.PCIE: 5.7e-6,
}
"""NCCL's own figures for the protocol of large messages (`baseLatencies`, `hwLatencies` of
src/graph/tuning.cc: ring, Simple); RCCL's links are taken to be as NVLink's."""


class Group(NamedTuple):
    """Ranks that communicate.

    Attributes:
        ranks: how many.
        span: neighbouring GPUs among which they lie, evenly spread.
    """

    ranks: int
    span: int

    def nodes(self, cluster: Cluster) -> int:
        """Nodes that have a rank."""
        return min(self.ranks, ceil(self.span / cluster.node_size))


def link_bytes_per_second(cluster: Cluster, *, within_node: bool, per_node: int = 1) -> float:
    """Bandwidth of a ring's slowest link, per direction.

    Between nodes a ring has the network of all its ranks of a node, each one's own; where these
    are several, it passes the links within the node too.

    Args:
        cluster: the links.
        within_node: whether the ring leaves no node.
        per_node: ranks of the ring in each node.
    """
    gpu = cluster.gpu
    shared = PCIE_SHARING if gpu.interconnect is Interconnect.PCIE else 1.0
    within = gpu.link_gbps * shared
    network = cluster.internode_gbps * per_node
    passed = [within] if within_node else [network, within][: min(per_node, 2)]
    return min(passed) * 1e9 * LINK_EFFICIENCY


def gather_seconds(cluster: Cluster, num_bytes: Any, group: Group, *, count: float) -> Any:
    """Seconds of all-gathers or reduce-scatters.

    Args:
        cluster: the links.
        num_bytes: of all of them together, whole; may be a numpy array.
        group: who takes part.
        count: how many there are.
    """
    if group.ranks == 1:
        return 0.0
    nodes = group.nodes(cluster)
    hop = HOP_SECONDS[cluster.gpu.interconnect]
    latency = (group.ranks - nodes) * hop + (nodes - 1) * NETWORK_HOP_SECONDS
    return _moved(cluster, num_bytes, group) + count * (START_SECONDS + latency)


def reduce_seconds(cluster: Cluster, num_bytes: Any, group: Group, *, count: float) -> Any:
    """Seconds of all-reduces, by ring or by tree, whichever has less latency; arguments as above.

    A tree moves as many bytes as a ring.
    """
    if group.ranks == 1:
        return 0.0
    nodes = group.nodes(cluster)
    hop = HOP_SECONDS[cluster.gpu.interconnect]
    ring = (group.ranks - nodes) * hop + (nodes - 1) * NETWORK_HOP_SECONDS
    tree = (group.ranks / nodes - 1) * hop + log2(nodes) * NETWORK_HOP_SECONDS
    latency = START_SECONDS + 2 * min(ring, tree)
    return 2 * _moved(cluster, num_bytes, group) + count * latency


def _moved(cluster: Cluster, num_bytes: Any, group: Group) -> Any:
    """Seconds of the bytes that pass every link once."""
    nodes = group.nodes(cluster)
    per_node = group.ranks // nodes
    link = link_bytes_per_second(cluster, within_node=nodes == 1, per_node=per_node)
    return num_bytes * (group.ranks - 1) / group.ranks / link
