"""What each optimizer keeps between steps and allocates during one, tensor by tensor.

Sources: `torch/optim/adamw.py`, `sgd.py`, `_muon.py`; transformers' `optimization.Adafactor` and
`trainer.py`; bitsandbytes' `optim/optimizer.py` (`Optimizer2State`, `Optimizer1State`).
Letters: n elements of a trained tensor on this GPU, b bytes of its elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from src.memory.counts import Tensor
from src.memory.size import FLOAT_BYTES
from src.spec import Optimizer

BLOCK_SIZE = 256
"""Elements that share a scale in bitsandbytes' 8-bit states."""
SMALLEST_8BIT = 4096
SMALLEST_PAGED = 100_000
"""Elements below which bitsandbytes keeps states in fp32, and on the GPU."""
QUANTILES_BYTES = 2 * 256 * FLOAT_BYTES
"""The two tables of 256 values that all 8-bit states share."""
HALF_BYTES = 2

PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)
EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
BITSANDBYTES = (*PAGED, Optimizer.ADAMW_8BIT, Optimizer.LION)


def state_bytes(optimizer: Optimizer, tensors: Sequence[Tensor], stored_bytes: int) -> float:
    """Bytes of states on the GPU.

    Args:
        optimizer: the optimizer.
        tensors: the trained tensors, as this GPU keeps them.
        stored_bytes: b; PyTorch's states take the parameter's dtype, others are fp32.
    """
    on_gpu = sum(sum(_states(optimizer, tensor, stored_bytes)) for tensor in tensors)
    if optimizer in EIGHT_BIT and any(_is_8bit(tensor) for tensor in tensors):
        on_gpu += QUANTILES_BYTES
    return on_gpu - paged_bytes(optimizer, tensors)


def paged_bytes(optimizer: Optimizer, tensors: Sequence[Tensor]) -> float:
    """Bytes of states in managed memory, which the driver moves between host and GPU."""
    if optimizer not in PAGED:
        return 0.0
    return sum(
        _states(optimizer, tensor, FLOAT_BYTES)[0]
        for tensor in tensors
        if tensor.numel >= SMALLEST_PAGED
    )


def _is_8bit(tensor: Tensor) -> bool:
    """Whether 8-bit AdamW keeps 8 bits: small tensors and the embeddings (Trainer) are fp32."""
    return tensor.numel >= SMALLEST_8BIT and not tensor.is_embedding


def _states(optimizer: Optimizer, tensor: Tensor, stored_bytes: int) -> tuple[float, float]:
    """(bytes of the tensor's states, bytes of their scales)."""
    numel = tensor.numel
    if optimizer is Optimizer.ADAFACTOR:
        return FLOAT_BYTES * _factors(tensor), 0.0
    if optimizer is Optimizer.MUON and not _is_matrix(tensor):
        return 2 * numel * stored_bytes, 0.0
    if optimizer in EIGHT_BIT and _is_8bit(tensor):
        return 2 * numel, 2 * FLOAT_BYTES * -(-numel // BLOCK_SIZE)
    bytes_ = FLOAT_BYTES if optimizer in BITSANDBYTES else stored_bytes
    return numel * bytes_ * optimizer.states_per_parameter, 0.0


def _factors(tensor: Tensor) -> float:
    """Adafactor's second moments: a mean per row and one per column; of a vector, all."""
    if len(tensor.shape) == 1:
        return tensor.numel
    return tensor.numel / tensor.shape[-1] + tensor.numel / tensor.shape[-2]


def _is_matrix(tensor: Tensor) -> bool:
    """Whether Muon takes it: PyTorch's works on two dimensions; the rest goes to AdamW."""
    return len(tensor.shape) == 2 and not tensor.is_edge


def temporary_bytes(optimizer: Optimizer, tensors: Sequence[Tensor], stored_bytes: int) -> float:
    """Bytes that a step allocates and frees; arguments as in `state_bytes`.

    AdamW, foreach: the square root of all second moments, `n b` in all; one by one: the root of one
    tensor's and the denominator made from it. Fused kernels, SGD and bitsandbytes': none.
    """
    if not tensors:
        return 0.0
    if optimizer is Optimizer.ADAMW:
        return sum(tensor.numel for tensor in tensors) * stored_bytes
    if optimizer is Optimizer.ADAMW_LOOP:
        return 2 * max(tensor.numel for tensor in tensors) * stored_bytes
    if optimizer is Optimizer.ADAFACTOR:
        return _adafactor_temporaries(tensors, stored_bytes)
    if optimizer is Optimizer.MUON:
        return _muon_temporaries(tensors, stored_bytes)
    return 0.0


def _adafactor_temporaries(tensors: Sequence[Tensor], stored_bytes: int) -> float:
    """The largest over the tensors, vectors last (a group of their own, without weight decay).

    Of each: its squared gradient, the sum with epsilon that takes its place, and the update of the
    tensor before, which its name still holds. From half precision also the gradient and the
    parameter in fp32, and the latter of the tensor before.
    """
    matrices = [tensor.numel for tensor in tensors if len(tensor.shape) > 1]
    ordered = [0.0, *matrices, *(tensor.numel for tensor in tensors if len(tensor.shape) == 1)]
    copies = 0 if stored_bytes == FLOAT_BYTES else 2
    return FLOAT_BYTES * max(before + (2 + copies) * numel for before, numel in pairwise(ordered))


def _muon_temporaries(tensors: Sequence[Tensor], stored_bytes: int) -> float:
    """Newton-Schulz of one matrix: the update, two half-precision iterates, two Gram matrices."""
    largest = 0.0
    for tensor in tensors:
        if not _is_matrix(tensor):
            continue
        update = tensor.numel * stored_bytes
        iterates = 2 * tensor.numel * HALF_BYTES
        grams = 2 * min(tensor.shape) ** 2 * HALF_BYTES
        largest = max(largest, update + iterates + grams)
    return largest
