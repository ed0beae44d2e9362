"""GPUs and clusters of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from src.errors import UserError
from src.units import GIB, MIB


class Interconnect(StrEnum):
    """What links the GPUs of one node."""

    PCIE = "pcie"
    NVLINK = "nvlink"
    XGMI = "xgmi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU model, as `conf/gpu/<sku>.yaml` gives it.

    Attributes:
        sku: short name.
        name: what `torch.cuda.get_device_name` prints.
        compute_capability: (major, minor).
        usable_gib: total memory as CUDA reports it, in GiB.
        context_mib: CUDA context of an idle PyTorch process in MiB; None where nobody measured it.
        memory_bandwidth_gbps: GB/s (1e9 bytes).
        bf16_tflops: dense matrix-multiply rate; None where the hardware has no bf16.
        fp16_tflops: dense matrix-multiply rate, fp32 accumulate.
        tf32_tflops: dense matrix-multiply rate; None before compute capability 8.0.
        fp32_tflops: vector rate.
        interconnect: link between GPUs of a node.
        link_gbps: bandwidth of that link per GPU and direction, GB/s.
        gpus_per_node: how many of them a node usually holds.
        sm_count: streaming multiprocessors.
    """

    sku: str
    name: str
    compute_capability: tuple[int, int]
    usable_gib: float
    context_mib: int | None
    memory_bandwidth_gbps: float
    bf16_tflops: float | None
    fp16_tflops: float
    tf32_tflops: float | None
    fp32_tflops: float
    interconnect: Interconnect
    link_gbps: float
    gpus_per_node: int
    sm_count: int

    @property
    def usable_bytes(self) -> int:
        """Total memory as CUDA reports it."""
        return round(self.usable_gib * GIB)

    @property
    def context_bytes(self) -> int | None:
        """CUDA context of an idle PyTorch process; None where nobody has measured it."""
        return None if self.context_mib is None else self.context_mib * MIB

    @property
    def is_nvidia(self) -> bool:
        """Whether CUDA (not ROCm) runs on it."""
        return self.interconnect is not Interconnect.XGMI


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal GPUs in equal nodes.

    Attributes:
        gpu: the GPU model.
        num_gpus: GPUs of the job, 1 or more.
        gpus_per_node: GPUs that share a node; `num_gpus` is a multiple of it, or at most it.
        internode_gbps: network bandwidth per GPU and direction between nodes, GB/s.
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    internode_gbps: float = 25.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise UserError(key="gpus", value=self.num_gpus, allowed="a whole number, 1 or more")
        if self.gpus_per_node < 1:
            raise UserError(
                key="gpus_per_node", value=self.gpus_per_node, allowed="a whole number, 1 or more"
            )
        if not self.internode_gbps > 0:
            raise UserError(
                key="internode_gbps", value=self.internode_gbps, allowed="GB/s, more than 0"
            )
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            raise UserError(
                key="gpus",
                value=self.num_gpus,
                allowed=f"a multiple of gpus_per_node={self.gpus_per_node}, or at most that many",
            )

    @property
    def node_size(self) -> int:
        """GPUs of this job on one node."""
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes of this job."""
        return self.num_gpus // self.node_size
