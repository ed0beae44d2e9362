"""Tokens per second: compute roofline, memory traffic, communication volume.

The constants are of the hardware and rounded; `Pace` is what measured step times say of them. It
ranks methods, and without a pace it does not promise speed.

Letters: B micro batch, S sequence, N data-parallel GPUs, t tensor-parallel degree, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from src.architecture import Decoder, describe
from src.architecture.ops import Attention, Experts, Linear
from src.memory import count_model, host_activation_bytes
from src.memory.counts import Counts
from src.plan.collectives import Group, gather_seconds, reduce_seconds
from src.spec import (
    Checkpointing,
    Cluster,
    FinetuneKind,
    Gpu,
    Job,
    Method,
    Offload,
    Precision,
    Step,
)
from src.units import MIB

MATMUL_EFFICIENCY = 0.5
"""Share of the dense peak rate that a training step's matrix multiplies reach."""

BANDWIDTH_EFFICIENCY = 0.8
"""Share of the memory bandwidth that pointwise kernels reach."""

HOST_BANDWIDTH = 20e9
"""Bytes/s between a GPU and the host, and of host memory per GPU: PCIe 4.0 x16 at that share."""

ACTIVATION_PASSES = 12
"""Reads and writes of a block's activations outside matrix multiplies, in hidden widths."""

LAUNCH_SECONDS = 5e-6
"""Host time of launching one operation: the floor of an empty CUDA kernel through PyTorch. An
operation of the model counts as one, so this is the least that small batches wait for."""

DDP_BUCKET_BYTES = 25 * MIB
"""`DistributedDataParallel(bucket_cap_mb=25)`, PyTorch's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        compute: matrix multiplies and attention of all micro steps.
        traffic: pointwise kernels' memory traffic of all micro steps.
        optimizer: reading and writing weights, gradients and states.
        exposed: communication that nothing hides.
        launch: what the GPU waits for the host, where kernels are shorter than their launch.
    """

    compute: float
    traffic: float
    optimizer: float
    exposed: float
    launch: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.traffic + self.optimizer + self.exposed + self.launch

    def at(self, pace: Pace) -> float:
        """All of it, at a pace."""
        memory = self.traffic + self.optimizer
        return (
            self.compute * pace.compute
            + memory * pace.memory
            + self.exposed * pace.communication
            + self.launch
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Measured seconds of one modelled second, by what takes them; 1 where nothing was measured.

    Attributes:
        compute: of `StepTime.compute`.
        memory: of `StepTime.traffic` and `optimizer`.
        communication: of `StepTime.exposed`.
        num_rows: measured steps that it rests on.
    """

    compute: float = 1.0
    memory: float = 1.0
    communication: float = 1.0
    num_rows: int = 0


MODELLED = Pace()
"""Of the model alone."""


def tokens_per_second(
    step: Step, cluster: Cluster, decoder: Decoder, pace: Pace = MODELLED
) -> float:
    """Tokens of all GPUs together per second of optimizer steps."""
    tokens = step.layout.dp * step.micro_batch * step.job.seq_len * step.job.grad_accum
    return tokens / step_time(step, cluster, decoder).at(pace)


def step_time(
    step: Step, cluster: Cluster, decoder: Decoder, *, micro_batch: Any = None
) -> StepTime:
    """The time of one optimizer step on every GPU.

    Args:
        step: the step.
        cluster: its GPUs and links.
        decoder: its model.
        micro_batch: in place of the step's; with a numpy array every part is one.
    """
    job, layout, gpu = step.job, step.layout, step.gpu
    batch = step.micro_batch if micro_batch is None else micro_batch
    tokens = batch * job.model_seq_len
    forward = forward_flops_per_token(decoder, job) * tokens / layout.tp
    rate = matmul_flops(gpu, job.precision) * MATMUL_EFFICIENCY
    compute = job.grad_accum * forward * _passes(job, decoder) / rate
    width = decoder.hidden_size * job.precision.compute_bytes
    moved = ACTIVATION_PASSES * width * decoder.num_layers * tokens * (1 + 1 / layout.tp) / 2
    bandwidth = gpu.memory_bandwidth_gbps * 1e9 * BANDWIDTH_EFFICIENCY
    counts = count_model(decoder, finetune=job.finetune, tp=layout.tp, shard=layout.shard).all
    weight_reads = counts.base * job.precision.compute_bytes * _passes(job, decoder)
    traffic = job.grad_accum * (moved * _passes(job, decoder) + weight_reads) / bandwidth
    states = 4 * (3 + 2 * job.optimizer.states_per_parameter)
    trained = counts.trained_shard if layout.shard > 1 else counts.trained
    optimizer = trained * states / bandwidth
    if job.offload is not Offload.NONE:
        optimizer = trained * states / HOST_BANDWIDTH
        traffic += _host_bytes_moved(step, counts, trained) / HOST_BANDWIDTH
    if job.activation_offload:
        # On the computing stream, there and back (`torch.autograd.graph.save_on_cpu`).
        moved = host_activation_bytes(step, batch)
        traffic += 2 * job.grad_accum * moved / HOST_BANDWIDTH
    waited = _host_seconds(step, decoder) - compute - traffic
    launch = waited * (waited > 0)
    passes = _passes(job, decoder)
    hidden_by = (compute + launch) * (passes - 1) / passes / job.grad_accum
    reduced = _data_parallel_seconds(step, cluster, counts.base, counts.trained) - hidden_by
    split = _tensor_parallel_seconds(step, cluster, decoder, batch)
    exposed = split + reduced * (reduced > 0)
    return StepTime(
        compute=compute,
        traffic=traffic,
        optimizer=optimizer,
        exposed=exposed,
        launch=launch,
    )


def _host_bytes_moved(step: Step, counts: Counts, trained: float) -> float:
    """Gradients to the host and new weights back; parameters, where they are there, per pass."""
    job, half = step.job, step.job.precision.compute_bytes
    moved = 2 * trained * half
    if job.offload is Offload.ALL:
        moved += 2 * job.grad_accum * counts.base_shard * job.precision.weight_bytes
    return moved


def _passes(job: Job, decoder: Decoder) -> float:
    """Forward-equivalents of one micro step: 1 forward, 1 or 2 backward, 1 recomputation.

    Frozen weights have no gradients: their backward is one forward's worth. Without checkpointing
    nothing flows through blocks in front of the first trained one.
    """
    recomputed = job.checkpointing is Checkpointing.FULL
    trained, reached = float(job.finetune.trains_weights), 1.0
    if job.finetune.kind is FinetuneKind.FREEZE:
        trained = job.finetune.trained_blocks / decoder.num_layers
        reached = 1.0 if recomputed else trained
    return 1 + reached + trained + recomputed


def forward_flops_per_token(decoder: Decoder, job: Job) -> float:
    """FLOPs of one token's forward pass: 2 per weight of every matrix multiply, and attention.

    Attention is `2 * 2 * S * width` per block, halved because positions are causal.
    """
    flops = 0.0
    blocks = [decoder.stem, *decoder.blocks, decoder.tail, decoder.head]
    for block in blocks:
        for op in block.ops:
            if isinstance(op, Linear):
                flops += 2 * op.in_features * op.width
            elif isinstance(op, Experts):
                flops += 2 * 3 * op.top_k * op.intermediate * op.width
            elif isinstance(op, Attention):
                flops += job.seq_len * op.num_heads * (op.head_dim + op.value_head_dim)
    return flops


def matmul_flops(gpu: Gpu, precision: Precision) -> float:
    """Peak FLOP/s of matrix multiplies; fp32 without TF32 (the default), emulated bf16 as fp32."""
    if precision is Precision.FP32:
        return gpu.fp32_tflops * 1e12
    if precision is Precision.FP16_MIXED:
        return gpu.fp16_tflops * 1e12
    return (gpu.bf16_tflops or gpu.fp32_tflops) * 1e12


def _data_parallel_seconds(step: Step, cluster: Cluster, base: float, trained: float) -> float:
    """Rings over the replicas, in the units that each engine takes at once.

    DDP all-reduces gradients, bucket by bucket; ZeRO-1 and ZeRO-2 move as much. FSDP and ZeRO-3
    gather whole weights block by block for forward and backward and reduce gradients once;
    `fsdp-grad` gathers once. Where there are several groups of shards (hybrid), each gathers and
    reduces within itself, and every rank's shard of the gradients is all-reduced over the groups.
    """
    method, layout, job = step.method, step.layout, step.job
    half = job.precision.compute_bytes
    everyone = Group(ranks=layout.dp, span=layout.num_gpus)
    if method.has_ddp:
        num_bytes = trained * job.precision.weight_bytes
        buckets = max(1, ceil(num_bytes / DDP_BUCKET_BYTES))
        return float(reduce_seconds(cluster, num_bytes, everyone, count=buckets))
    if method in (Method.ZERO1, Method.ZERO2):
        buckets = max(1, ceil(trained / job.zero.reduce_bucket_size))
        return float(reduce_seconds(cluster, trained * half, everyone, count=buckets))
    units = describe(job.model).num_layers + 1
    gathers = (1 if method is Method.FSDP_GRAD else 2) * job.grad_accum
    shards = Group(ranks=layout.shard, span=layout.shard * layout.tp)
    replicas = Group(ranks=layout.dp // layout.shard, span=layout.num_gpus)
    gathered = gather_seconds(
        cluster, gathers * base * half + trained * half, shards, count=(gathers + 1) * units
    )
    return float(
        gathered + reduce_seconds(cluster, trained * half / layout.shard, replicas, count=units)
    )


def _tensor_parallel_seconds(step: Step, cluster: Cluster, decoder: Decoder, batch: Any) -> Any:
    """Two all-reduces of the hidden states per block and pass, on the critical path.

    Split along the sequence, each is a reduce-scatter and an all-gather, which move as much.
    """
    job, degree = step.job, step.layout.tp
    hidden = batch * job.seq_len * decoder.hidden_size * job.precision.compute_bytes
    passes = 2 + (1 if job.checkpointing is Checkpointing.FULL else 0)
    count = 2 * passes * decoder.num_layers * job.grad_accum
    return reduce_seconds(cluster, count * hidden, Group(ranks=degree, span=degree), count=count)


def _host_seconds(step: Step, decoder: Decoder) -> float:
    """Seconds in which the host launches the kernels of all micro steps, one after the other."""
    parts = (decoder.stem, *decoder.blocks, decoder.tail, decoder.head)
    launched = sum(len(part.ops) for part in parts)
    return step.job.grad_accum * launched * _passes(step.job, decoder) * LAUNCH_SECONDS
