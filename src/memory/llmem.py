"""LLMem's own formulas: what fine-tuning under Colossal-AI's Gemini needs, without its GPUs.

Source: LLMem (IJCAI 2024, arXiv 2404.10933) and its code (taehokim20/LLMem), for full fine-tuning
with fp16 weights, an fp32 master copy, HybridAdam and activation checkpointing. LLMem adds its
terms up as if all peaked at once, and what it estimates is what nvidia-smi shows: level `device`.

Letters: B micro batch, S sequence, D hidden size, V vocabulary, L blocks, N GPUs, t tensor-parallel
degree, E elements of all parameters as chunks hold them, `up()` rounds up to 2 MiB, the
allocator's large-block rounding.

| method | bytes |
|---|---|
| single, ddp (CDP) | `m_base + m_p + m_os + m_out + m_lm` |
| fsdp (ADP: ZeRO-3) | `m_base + m_p16 + (m_p32 + m_os)/N + m_out + m_lm` |
| tp | `m_base + (m_p + m_os)/N + m_out + m_lm + m_back` |
| fsdp+tp (DP+TP) | `m_base + m_p16*(1 - t/N) + (m_p32 + m_os)/N + m_out + m_lm + m_back` |

LLMem reads `m_base + m_p` off the GPUs as one number, after Gemini has built its chunks. Here each
is worked out: `m_p` by the chunk search, `m_base` as CUDA context and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from src.architecture import describe
from src.architecture.ops import Embed, Experts, Linear, Op
from src.errors import NotCoveredError, UserError
from src.memory.chunks import SMALLEST_CHUNK, chunk_elements
from src.memory.levels import level_model
from src.spec import (
    Checkpointing,
    FinetuneKind,
    Job,
    Loss,
    Method,
    Model,
    Offload,
    Optimizer,
    Precision,
    Step,
)
from src.units import MIB, Levels

HALF_BYTES = 2
"""`B16`."""

FULL_BYTES = 4
"""`B32`."""

STATES = 2
"""HybridAdam's states per parameter, fp32."""

ROUNDING = 2 * MIB
"""What `up()` rounds up to."""

FP32_LOGITS = ("codegen", "gpt_neo")
"""Families whose code makes the logits fp32 (transformers 4.29), as LLMem lists them."""

FAMILIAR = (Method.SINGLE, Method.DDP, Method.FSDP, Method.TP, Method.FSDP_TP)
"""Methods that LLMem has a formula for."""


class LlmemInstant(StrEnum):
    """LLMem knows no instants: its terms are added up."""

    SUM_OF_TERMS = "sum_of_terms"


class LlmemTerm(StrEnum):
    """LLMem's terms under its own names, as this GPU holds them.

    M_P: fp16 parameters, which gradients share, and the fp32 master copy; M_P16 and M_P32 apart.
    M_OS: HybridAdam's states. M_OUT: outputs of embeddings and blocks, kept by checkpointing.
    M_LM: logits, two shifted copies of them and lm_head. M_BACK: all-gathers of the backward pass.
    """

    M_P = "m_p"
    M_P16 = "m_p16"
    M_P32 = "m_p32"
    M_OS = "m_os"
    M_OUT = "m_out"
    M_LM = "m_lm"
    M_BACK = "m_back"


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmemEstimate:
    """What LLMem's formulas say of one step.

    Attributes:
        peak_bytes: `device` is LLMem's figure; `reserved` and `allocated` are both that without
            `m_base`, as LLMem does not tell them apart.
        upper_bytes: the same: LLMem has no upper bound.
        peak_instant: always the sum of all terms.
        ledger: that sum's terms in bytes, without `m_base`.
        host_bytes: none: its offloading is not in its formulas.
        notes: where the job is not quite the one that LLMem speaks of.
    """

    peak_bytes: Levels
    upper_bytes: Levels
    peak_instant: LlmemInstant
    ledger: Mapping[LlmemInstant, Mapping[LlmemTerm, int]]
    host_bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedModel:
    """A model's bytes by LLMem's formulas, on one GPU that holds all of it.

    Attributes:
        chunk: elements of one chunk.
        elements: E, `embed_p + ceil(other_p / chunk) * chunk`.
        states: `m_os`, the sum of `up(numel * 2 * B32)` over Embedding and Linear tensors.
        head: `lm_head`, bytes of its fp16 weight.
        num_outputs: outputs that `m_out` counts: of embeddings and blocks.
        hidden: D.
        vocab: V.
        num_blocks: L.
        logit_bytes: bytes per logit.
    """

    chunk: int
    elements: int
    states: int
    head: int
    num_outputs: int
    hidden: int
    vocab: int
    num_blocks: int
    logit_bytes: int


def up(num_bytes: int) -> int:
    """Bytes rounded up to 2 MiB."""
    return _over(num_bytes, ROUNDING) * ROUNDING


def _over(num_bytes: int, degree: int) -> int:
    """A share of `num_bytes`, rounded up to whole bytes."""
    return -(-num_bytes // degree)


@lru_cache(maxsize=256)
def chunked_model(model: Model, num_gpus: int) -> ChunkedModel:
    """The model's bytes where chunks are dealt out to `num_gpus`.

    Raises:
        UserError: the config is impossible.
    """
    decoder = describe(model)
    stem, blocks = decoder.stem.ops, [op for block in decoder.blocks for op in block.ops]
    ops: list[Op] = [*stem, *blocks, *decoder.tail.ops, *decoder.head.ops]
    embeddings = [op for op in stem if isinstance(op, Embed)]
    tensors = [parameter.numel for parameter in decoder.named_parameters()]
    chunk = chunk_elements(tensors, group=num_gpus)
    embedded = sum(parameter.numel for op in embeddings for parameter in op.parameters())
    if sum(tensors) < SMALLEST_CHUNK:
        elements = sum(tensors)
    else:
        elements = embedded + _over(sum(tensors) - embedded, chunk) * chunk
    head = decoder.lm_head
    return ChunkedModel(
        chunk=chunk,
        elements=elements,
        states=sum(
            up(parameter.numel * STATES * FULL_BYTES)
            for op in ops
            if isinstance(op, Embed | Linear | Experts)
            for parameter in op.parameters()
        ),
        head=up(head.in_features * head.width * HALF_BYTES),
        num_outputs=len(embeddings) + decoder.num_layers,
        hidden=decoder.hidden_size,
        vocab=decoder.vocab_size,
        num_blocks=decoder.num_layers,
        logit_bytes=FULL_BYTES if decoder.model_type in FP32_LOGITS else HALF_BYTES,
    )


def parameter_bytes(elements: int) -> int:
    """`m_p = up(E * (B16 + B32))`; Gemini's gradients overwrite the fp16 parameters."""
    return up(elements * (HALF_BYTES + FULL_BYTES))


def output_bytes(model: ChunkedModel, tokens: int) -> int:
    """`m_out = up((embeddings + L) * B*S * D * B16)`: what checkpointing keeps."""
    return up(model.num_outputs * tokens * model.hidden * HALF_BYTES)


def lm_bytes(model: ChunkedModel, micro_batch: int, seq_len: int) -> int:
    """`m_lm = up(B*S*V*b) + 2*up(B*(S-1)*V*b) + lm_head`, b bytes per logit."""
    per_position = micro_batch * model.vocab * model.logit_bytes
    return up(seq_len * per_position) + 2 * up((seq_len - 1) * per_position) + model.head


def backward_bytes(model: ChunkedModel, tokens: int, tp: int) -> int:
    """`m_back = up(L * B*S * D * (t-1)/t * B16)`: what TP gathers in the backward pass."""
    return up(_over(model.num_blocks * tokens * model.hidden * (tp - 1) * HALF_BYTES, tp))


def base_bytes(step: Step) -> int:
    """`m_base`: CUDA context and NCCL, as the formula takes them too (`src.memory.outside`).

    Framework bytes beyond these are not known without a GPU. Bytes that the driver keeps for itself
    are in LLMem's figures (it adds NVML's used less nvidia-smi's); here they are outside both the
    level `device` and the usable capacity.
    """
    return level_model(step.layout, step.gpu).outside


def _terms(step: Step) -> dict[LlmemTerm, int]:
    """Bytes of each term; see the table at the head of the module.

    Raises:
        NotCoveredError: LLMem does not know the method.
        UserError: the config is impossible.
    """
    gpus, tp = step.layout.num_gpus, step.layout.tp
    model = chunked_model(step.job.model, gpus)
    tokens = step.micro_batch * step.job.seq_len
    activations = {
        LlmemTerm.M_OUT: output_bytes(model, tokens),
        LlmemTerm.M_LM: lm_bytes(model, step.micro_batch, step.job.seq_len),
    }
    if step.method.has_tensor_parallel:
        activations[LlmemTerm.M_BACK] = backward_bytes(model, tokens, tp)
    whole = up(model.elements * HALF_BYTES)
    sharded = {
        LlmemTerm.M_P32: _over(up(model.elements * FULL_BYTES), gpus),
        LlmemTerm.M_OS: _over(model.states, gpus),
    }
    match step.method:
        case Method.SINGLE | Method.DDP | Method.TP:
            return {
                LlmemTerm.M_P: _over(parameter_bytes(model.elements), tp),
                LlmemTerm.M_OS: _over(model.states, tp),
                **activations,
            }
        case Method.FSDP:
            return {LlmemTerm.M_P16: whole, **sharded, **activations}
        case Method.FSDP_TP:
            return {LlmemTerm.M_P16: _over(whole * (gpus - tp), gpus), **sharded, **activations}
    raise _unknown(step.method)


def _unknown(method: Method) -> NotCoveredError:
    allowed = f"LLMem has no formula for it, only for {', '.join(FAMILIAR)}"
    if method is Method.DDP_TP:
        allowed = "LLMem's DP+TP shards the states over the replicas: method=fsdp+tp"
    return NotCoveredError(key="method", value=method.value, allowed=allowed)


_KNOWN: tuple[tuple[str, Callable[[Job], object], tuple[object, ...], str], ...] = (
    ("finetune", lambda job: job.finetune.kind, (FinetuneKind.FULL,), "full"),
    (
        "precision",
        lambda job: job.precision,
        (Precision.FP16_MIXED, Precision.BF16_MIXED),
        "fp16-mixed or bf16-mixed",
    ),
    (
        "optimizer",
        lambda job: job.optimizer,
        (Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.ADAMW_LOOP),
        "adamw, adamw-fused or adamw-loop, in place of HybridAdam",
    ),
    ("checkpointing", lambda job: job.checkpointing, (Checkpointing.FULL,), "full"),
    ("checkpoint_every", lambda job: job.checkpoint_every, (1,), "1"),
    ("loss", lambda job: job.loss, (Loss.STANDARD, Loss.STANDARD_4X), "standard or standard-4x"),
    ("grad_accum", lambda job: job.grad_accum, (1,), "1"),
    ("offload", lambda job: job.offload, (Offload.NONE,), "none"),
    ("activation_offload", lambda job: job.activation_offload, (False,), "false"),
    ("sequence_parallel", lambda job: job.sequence_parallel, (False,), "false"),
    ("vocab_parallel", lambda job: job.vocab_parallel, (False,), "false"),
)
"""(key, its value, values that LLMem's formulas speak of, the same in words)."""


def check_job(job: Job) -> None:
    """Raise UserError for a job that LLMem's formulas do not speak of."""
    for key, value_of, known, words in _KNOWN:
        value = value_of(job)
        if value not in known:
            raise UserError(key=key, value=value, allowed=f"estimator=llmem knows {words} only")


def _notes(job: Job) -> tuple[str, ...]:
    if job.precision is Precision.BF16_MIXED:
        return ("LLMem speaks of fp16: bf16 takes the same bytes",)
    return ()


def llmem_step(step: Step) -> LlmemEstimate:
    """LLMem's estimate of one step.

    Raises:
        NotCoveredError: LLMem does not know the method.
        UserError: the config is impossible, or LLMem speaks of no such job.
    """
    check_job(step.job)
    terms = _terms(step)
    held = sum(terms.values())
    levels = Levels(allocated=held, reserved=held, device=held + base_bytes(step))
    return LlmemEstimate(
        peak_bytes=levels,
        upper_bytes=levels,
        peak_instant=LlmemInstant.SUM_OF_TERMS,
        ledger={LlmemInstant.SUM_OF_TERMS: terms},
        notes=_notes(step.job),
    )
