"""Which methods, with which degrees, are possible on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture import Decoder
from src.architecture.ops import Experts, Linear, Parallel
from src.errors import UserError
from src.spec import Cluster, Job, Layout, Method, Request, refusal, uneven_sequence

_UNKNOWN_HEADS = "tensor parallelism needs a model_type whose heads are known here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One method with one layout."""

    method: Method
    layout: Layout


def tensor_parallel_degrees(decoder: Decoder, cluster: Cluster) -> tuple[int, ...]:
    """Degrees above 1 that divide the GPUs, the heads and the key/value heads and fit a node.

    None for experts with biases (gpt-oss's are interleaved too) or with an attention that is split
    by no plan (DeepSeek's).
    """
    heads = decoder.attention
    if decoder.has_experts and not _splits_experts(decoder):
        return ()
    return tuple(
        degree
        for degree in range(2, cluster.node_size + 1)
        if cluster.num_gpus % degree == 0
        and cluster.node_size % degree == 0
        and heads.num_heads % degree == 0
        and heads.num_kv_heads % degree == 0
        and all(experts.intermediate % degree == 0 for experts in _experts(decoder))
    )


def _experts(decoder: Decoder) -> tuple[Experts, ...]:
    return tuple(op for block in decoder.blocks for op in block.ops if isinstance(op, Experts))


def _splits_experts(decoder: Decoder) -> bool:
    linears = (op for block in decoder.blocks for op in block.ops if isinstance(op, Linear))
    whole = any(op.is_attention and op.parallel is Parallel.REPLICATED for op in linears)
    return not whole and not any(experts.bias for experts in _experts(decoder))


def candidates(request: Request, decoder: Decoder | None) -> tuple[Candidate, ...]:
    """Every candidate of a request; without a decoder none that needs the model's heads.

    Raises:
        UserError: a method, or a tensor-parallel degree, that was asked for is impossible.
    """
    degrees = asked_degrees(request, decoder)
    found: list[Candidate] = []
    for method in request.methods or _every_method(request):
        mine = _layouts(method, request.cluster.num_gpus, request.cluster.node_size, degrees)
        if request.methods:
            _refuse(request, decoder, method, possible=bool(mine), degrees=degrees)
        found += [Candidate(method=method, layout=layout) for layout in mine]
    if not found:
        raise UserError(
            key="tp",
            value=request.tp,
            allowed=f"no method uses it on gpus={request.cluster.num_gpus}",
        )
    return tuple(found)


def _uneven(request: Request, degree: int) -> UserError | None:
    return uneven_sequence(request.job, Layout(tp=degree))


def _every_method(request: Request) -> tuple[Method, ...]:
    if request.cluster.num_gpus == 1:
        _require_possible(request.job, Method.SINGLE)
        return (Method.SINGLE,)
    several = [method for method in Method if method is not Method.SINGLE]
    every = [method for method in several if refusal(request.job, method) is None]
    if not every:
        _require_possible(request.job, several[0])
    if request.tp is not None:
        every = [method for method in every if method.has_tensor_parallel is (request.tp > 1)]
    return tuple(every)


def asked_degrees(request: Request, decoder: Decoder | None) -> tuple[int, ...]:
    """The tensor-parallel degrees above 1 to try.

    Raises:
        UserError: `tp` was given and is not one of them.
    """
    if decoder is None:
        if request.tp not in (None, 1):
            raise UserError(key="tp", value=request.tp, allowed=f"1: {_UNKNOWN_HEADS}")
        return ()
    degrees = tensor_parallel_degrees(decoder, request.cluster)
    if request.tp is None:
        return tuple(tp for tp in degrees if _uneven(request, tp) is None)
    if request.tp == 1:
        return ()
    if request.tp not in degrees:
        heads = decoder.attention
        possible = ", ".join(str(degree) for degree in (1, *degrees))
        raise UserError(
            key="tp",
            value=request.tp,
            allowed=(
                f"has to divide gpus={request.cluster.num_gpus}, {heads.num_heads} heads and "
                f"{heads.num_kv_heads} key/value heads and fit a node of "
                f"{request.cluster.node_size}; possible: {possible}"
            ),
        )
    return (request.tp,)


def _layouts(
    method: Method, num_gpus: int, node: int, degrees: tuple[int, ...]
) -> tuple[Layout, ...]:
    if method is Method.SINGLE:
        return (Layout(),) if num_gpus == 1 else ()
    if method is Method.TP:
        return tuple(Layout(tp=degree) for degree in degrees if degree == num_gpus)
    if method.has_tensor_parallel:
        return tuple(
            Layout(
                dp=num_gpus // degree,
                tp=degree,
                shard=num_gpus // degree if method.is_fsdp else 1,
            )
            for degree in degrees
            if degree < num_gpus
        )
    if method is Method.HSDP:
        return tuple(Layout(dp=num_gpus, shard=shard) for shard in _hybrid_shards(num_gpus, node))
    return (Layout(dp=num_gpus, shard=1 if method is Method.DDP else num_gpus),)


def _hybrid_shards(num_gpus: int, node: int) -> tuple[int, ...]:
    """HSDP shards within a node and replicates over nodes; on one node, over its halves."""
    shard = node if node < num_gpus else num_gpus // 2
    return (shard,) if shard > 1 and num_gpus % shard == 0 else ()


def _refuse_uneven(request: Request, decoder: Decoder) -> None:
    """Raise UserError where no degree is left because none divides the sequence."""
    for degree in tensor_parallel_degrees(decoder, request.cluster):
        uneven = _uneven(request, degree)
        if uneven is not None:
            raise uneven


def _require_possible(job: Job, method: Method) -> None:
    error = refusal(job, method)
    if error is not None:
        raise error


def _refuse(
    request: Request,
    decoder: Decoder | None,
    method: Method,
    *,
    possible: bool,
    degrees: tuple[int, ...],
) -> None:
    """Raise UserError for a method that was asked for and cannot run."""
    num_gpus = request.cluster.num_gpus
    _require_possible(request.job, method)
    if possible:
        return
    if decoder is not None and method.has_tensor_parallel and not degrees:
        _refuse_uneven(request, decoder)
    if method is Method.SINGLE:
        allowed = f"runs on one GPU; gpus=1 instead of gpus={num_gpus}"
    elif num_gpus == 1:
        allowed = "needs 2 GPUs or more; method=single on one"
    elif method is Method.HSDP:
        allowed = f"needs two groups of 2 GPUs or more; gpus={num_gpus} cannot be halved so"
    elif decoder is None:
        allowed = _UNKNOWN_HEADS
    elif decoder.has_experts:
        allowed = "there is no tensor-parallel plan for this mixture of experts"
    elif not degrees:
        allowed = f"no tensor-parallel degree divides the model's heads on gpus={num_gpus}"
    elif method is Method.TP:
        allowed = f"needs one degree over all gpus={num_gpus}; possible degrees: " + ", ".join(
            str(degree) for degree in degrees
        )
    else:
        allowed = f"needs data-parallel replicas beside tensor parallelism on gpus={num_gpus}"
    raise UserError(key="method", value=method.value, allowed=allowed)
