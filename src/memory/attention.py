"""What each attention kernel keeps and allocates.

Letters: B, S; H heads, K key/value heads, d head dim, all on this GPU; S128 = S rounded up to 128.
Sources: PyTorch's `derivatives.yaml`, `sdp_utils.cpp`, `attention.cu`, `attention_backward.cu`;
FlashAttention-2's `flash_api.cpp`; transformers' `eager_attention_forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture.ops import Attention
from src.memory.kernels import Kernel
from src.memory.pieces import MASK_BYTES, Pieces
from src.memory.size import FLOAT_BYTES, Size, per_score, per_token
from src.memory.terms import Term
from src.memory.values import Value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """Heads on this GPU."""

    query: float
    key: float
    head_dim: int
    value_head_dim: int

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key/value head."""
        return self.key != self.query


def lower_attention(low: Pieces, op: Attention, query: Value, key: Value, value: Value) -> Value:
    """Write an attention down under the regime's kernel."""
    heads = _Heads(
        query=query.width / op.head_dim,
        key=key.width / op.head_dim,
        head_dim=op.head_dim,
        value_head_dim=op.value_head_dim,
    )
    kernel = low.regime.kernel
    head_major = query in low.head_major
    if low.regime.autocast or kernel is Kernel.FLASH:
        query, key, value = (
            low.cast(item, low.regime.compute_bytes) for item in (query, key, value)
        )
    if kernel is Kernel.FLASH:
        out = _flash(low, heads, query, key, value)
        return low.contiguous(out) if head_major else out
    if kernel is Kernel.EFFICIENT:
        return _efficient(low, op, heads, query, key, value)
    if kernel is Kernel.MATH:
        return _math(low, op, heads, query, key, value)
    return _eager(low, op, heads, query, key, value)


def _output(low: Pieces, heads: _Heads, query: Value) -> Value:
    width = heads.query * heads.value_head_dim
    return low.tape.tensor(width, query.dtype_bytes, share=query.share)


def _row_statistics(low: Pieces, heads: _Heads) -> Value:
    """One fp32 log-sum-exp per head and position."""
    return low.tape.tensor(heads.query, FLOAT_BYTES, requires_grad=False)


def _flash(low: Pieces, heads: _Heads, query: Value, key: Value, value: Value) -> Value:
    """Keeps q, k, v, out and the log-sum-exp; out is laid out as q is.

    Backward: fp32 `H*S128` and `H*S128*d32` accumulators; under grouped queries dk and dv of all H
    heads before they are summed.
    """
    out = _output(low, heads, query)
    d32 = (heads.head_dim + 31) // 32 * 32
    temporary = Size(per_padded=heads.query * FLOAT_BYTES * (1 + d32))
    if heads.grouped:
        expanded = 2 * heads.query * heads.head_dim * query.dtype_bytes
        temporary = temporary.plus(per_token(expanded))
    saved = [query, key, value, out, _row_statistics(low, heads)]
    low.tape.record(out, [query, key, value], saved=saved, temporary=temporary)
    return out


def _repeated(low: Pieces, heads: _Heads, item: Value) -> Value:
    """`repeat_kv`: key or value heads copied to all query heads."""
    if not heads.grouped:
        return item
    return low.copy(item, round(item.width / item.share * heads.query / heads.key), upcast=False)


def _efficient(
    low: Pieces, op: Attention, heads: _Heads, query: Value, key: Value, value: Value
) -> Value:
    """Keeps q, k, v (repeated to all heads), out, log-sum-exp and mask; backward fp32 `H*S`.

    A single key/value head is repeated by a view, without a copy.
    """
    if heads.key != 1:
        key, value = _repeated(low, heads, key), _repeated(low, heads, value)
    out = _output(low, heads, query)
    saved = [query, key, value, out, _row_statistics(low, heads)]
    if op.alibi:
        saved.append(_mask(low, heads.query * query.dtype_bytes))
    elif low.regime.masked or op.explicit_mask:
        saved.append(_mask(low, query.dtype_bytes))
    temporary = per_token(heads.query * FLOAT_BYTES)
    low.tape.record(out, [query, key, value], saved=saved, temporary=temporary)
    return out


def _mask(low: Pieces, bytes_per_score: float) -> Value:
    """The mask as a kernel takes it: boolean ones are turned to the computation's dtype."""
    return low.tape.tensor(
        0,
        1,
        size=per_score(bytes_per_score),
        term=Term.ATTENTION_SCORES,
        requires_grad=False,
    )


def _scores(low: Pieces, heads: _Heads, dtype_bytes: int) -> Value:
    return low.tape.tensor(
        0,
        dtype_bytes,
        size=per_score(heads.query * dtype_bytes),
        term=Term.ATTENTION_SCORES,
    )


def _math(
    low: Pieces, op: Attention, heads: _Heads, query: Value, key: Value, value: Value
) -> Value:
    """PyTorch's reference path: fp32 scaled copies of q and k, fp32 softmax, all kept."""
    scaled_query = low.copy(query, round(query.width / query.share), upcast=True)
    scaled_key = low.copy(key, round(key.width / key.share), upcast=True)
    values = low.cast(value, FLOAT_BYTES)
    keys, values = _repeated(low, heads, scaled_key), _repeated(low, heads, values)
    raw = _scores(low, heads, FLOAT_BYTES)
    low.tape.record(raw, [scaled_query, keys], saved=[scaled_query, keys])
    soft = _scores(low, heads, FLOAT_BYTES)
    low.tape.record(soft, [raw], saved=[soft])
    if op.dropout:
        soft = _dropped(low, heads, soft)
    out = low.tape.tensor(heads.query * heads.value_head_dim, FLOAT_BYTES, share=query.share)
    low.tape.record(out, [soft, values], saved=[soft, values])
    return low.contiguous(low.cast(out, query.dtype_bytes))


def _dropped(low: Pieces, heads: _Heads, source: Value) -> Value:
    """Dropout on the attention weights keeps a one-byte mask."""
    mask = low.tape.tensor(
        0,
        MASK_BYTES,
        size=per_score(heads.query * MASK_BYTES),
        term=Term.DROPOUT_MASKS,
        requires_grad=False,
    )
    out = _scores(low, heads, source.dtype_bytes)
    low.tape.record(out, [source], saved=[mask])
    return out


def _eager(
    low: Pieces, op: Attention, heads: _Heads, query: Value, key: Value, value: Value
) -> Value:
    """`softmax(q @ k.T * scale + mask)` in fp32, back to the computation's dtype, dropout, `@ v`.

    Keeps q, k and v laid out head by head (copied so unless they are), the softmax's fp32 result,
    its half-precision copy, and the dropout's mask.
    """
    compute = query.dtype_bytes
    query, key, value = (
        item if item in low.head_major else low.contiguous(item) for item in (query, key, value)
    )
    key, value = _repeated(low, heads, key), _repeated(low, heads, value)
    if op.eager_fp32 and not low.regime.autocast:
        query, key = low.cast(query, FLOAT_BYTES), low.cast(key, FLOAT_BYTES)
    raw = _scores(low, heads, query.dtype_bytes)
    low.tape.record(raw, [query, key], saved=[query, key])
    scaled = _scores(low, heads, raw.dtype_bytes)
    low.tape.record(scaled, [raw])
    if op.softcap:
        scaled = _capped(low, heads, scaled)
    softmax_bytes = FLOAT_BYTES if op.softmax_fp32 or low.regime.autocast else scaled.dtype_bytes
    if op.sinks_name is not None:
        # The softmax is told the dtype of scores and sinks put together; autocast lets it be.
        softmax_bytes = max(scaled.dtype_bytes, low.regime.parameter_bytes)
    taken = low.cast(scaled, softmax_bytes)
    soft = _scores(low, heads, softmax_bytes)
    low.tape.record(soft, [taken], saved=[soft])
    weights = soft
    if softmax_bytes != compute:
        weights = _scores(low, heads, compute)
        low.tape.record(weights, [soft])
    if op.dropout:
        weights = _dropped(low, heads, weights)
    width = heads.query * heads.value_head_dim
    out = low.tape.tensor(width, compute, share=query.share)
    low.tape.record(out, [weights, value], saved=[weights, value])
    return low.contiguous(out)


def _capped(low: Pieces, heads: _Heads, source: Value) -> Value:
    """`tanh(scores / cap) * cap` keeps the tanh's result."""
    divided = _scores(low, heads, source.dtype_bytes)
    low.tape.record(divided, [source])
    tanh = _scores(low, heads, source.dtype_bytes)
    low.tape.record(tanh, [divided], saved=[tanh])
    out = _scores(low, heads, source.dtype_bytes)
    low.tape.record(out, [tanh])
    return out
