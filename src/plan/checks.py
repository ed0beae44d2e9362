"""What cannot be known from the request's fields one by one: the job against the model."""

from __future__ import annotations

from dataclasses import replace

from src.architecture import Decoder, Positions
from src.architecture.ops import Linear
from src.errors import UserError, nearest
from src.memory import implementation, is_target
from src.spec import Precision, Request


def check(request: Request, decoder: Decoder) -> tuple[str, ...]:
    """Warnings about a job that can run.

    Raises:
        UserError: it cannot: the sequence passes a learned table of positions, or LoRA targets
            name no Linear of the blocks.
    """
    job = request.job
    warnings: list[str] = []
    limit = decoder.max_positions
    if limit is not None and job.model_seq_len > limit:
        if decoder.positions is Positions.LEARNED:
            allowed = f"at most {limit}: {job.model.name} has a table of {limit} positions"
            raise UserError(key="seq_len", value=job.seq_len, allowed=allowed)
        warnings.append(
            f"seq_len={job.seq_len} is beyond the {limit} positions that {job.model.name} was "
            "trained for"
        )
    _check_targets(request, decoder)
    if implementation(decoder, job) is not job.attention:
        warnings.append(
            f"transformers has no {job.attention.value} attention for {decoder.model_type}; "
            "it runs eager, and so does this estimate"
        )
    gpu = request.cluster.gpu
    if job.precision in (Precision.BF16_MIXED, Precision.BF16_TRUE) and gpu.bf16_tflops is None:
        warnings.append(
            f"{gpu.sku} has no bf16 units: bf16 is emulated there; precision=fp16-mixed"
        )
    if not gpu.is_nvidia:
        warnings.append(f"{gpu.sku} runs ROCm; kernels and allocator are taken to be as on CUDA")
    return tuple(warnings)


def _check_targets(request: Request, decoder: Decoder) -> None:
    targets = request.job.finetune.targets
    if targets == ("all-linear",) and request.job.finetune.is_lora and decoder.has_experts:
        allowed = "adapters of stacked experts are not known to the formula; name the Linears"
        raise UserError(key="finetune.targets", value="all-linear", allowed=allowed)
    if not request.job.finetune.is_lora or targets in ((), ("all-linear",)):
        return
    linears = [
        op
        for part in (
            decoder.stem,
            *{id(block): block for block in decoder.blocks}.values(),
            decoder.tail,
            decoder.head,
        )
        for op in part.ops
        if isinstance(op, Linear) and op.is_module and op is not decoder.lm_head
    ]
    names = {op.name.rsplit(".", 1)[-1] for op in linears}
    for target in targets:
        finetune = replace(request.job.finetune, targets=(target,))
        if not any(is_target(op, finetune, decoder.lm_head.name) for op in linears):
            close = nearest(target, names) or sorted(names)
            raise UserError(
                key="finetune.targets",
                value=target,
                allowed=f"no Linear of {request.job.model.name}; has {', '.join(close)}",
            )
