"""Models that keep some parameters in fp32 whatever their own dtype, and FSDP, which refuses them.

`fully_shard` wants one dtype among the trained parameters of a unit ("FSDP expects uniform original
parameter dtype", torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
"""

from __future__ import annotations

from src.architecture import Decoder
from src.errors import NotCoveredError
from src.spec import Job, Layout, Method, Precision


def check_uniform_dtypes(decoder: Decoder, job: Job, method: Method, layout: Layout) -> None:
    """Refuse FSDP over trained parameters of two dtypes.

    Adapters are all of one dtype, and with fp32 or mixed precision every stored parameter is fp32.

    Raises:
        NotCoveredError: the model keeps parameters in fp32 beside half-precision ones.
    """
    sharded = method.is_fsdp and layout.shard > 1 and job.finetune.trains_weights
    if sharded and job.precision is Precision.BF16_TRUE and decoder.fp32_parameters:
        raise mixed_dtypes(job, decoder.fp32_parameters[0])


def mixed_dtypes(job: Job, parameter: str) -> NotCoveredError:
    """The error for a model whose `parameter` (within its block) stays fp32."""
    return NotCoveredError(
        key="precision",
        value=job.precision,
        allowed=(
            f"FSDP shards units of one dtype and {job.model.model_type} keeps {parameter} in fp32; "
            "precision=bf16-mixed or fp32, or a method without FSDP"
        ),
    )
