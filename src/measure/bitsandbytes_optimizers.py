"""A stand-in for bitsandbytes' optimizers, which need its CUDA library: the same states, in place.

Source: bitsandbytes' `optim/optimizer.py` (`init_state`, `get_state_buffer`); transformers'
`Trainer.create_optimizer`, which keeps embeddings in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

BLOCK_SIZE = 256
SMALLEST_8BIT = 4096
SMALLEST_PAGED = 100_000
NUM_QUANTILES = 256


class BitsandbytesOptimizer(torch.optim.Optimizer):
    """AdamW (two states) or Lion (one), in 32 or 8 bits, in the allocator or paged.

    Args:
        params: parameter groups.
        num_states: states per parameter.
        bits: 8 or 32.
        paged: large states live in managed memory: nothing is allocated for them here.
        in_32_bits: parameters that keep 32 bits whatever `bits` says.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        num_states: int,
        bits: int = 32,
        paged: bool = False,
        in_32_bits: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__(params, {})
        self._num_states = num_states
        self._bits = bits
        self._paged = paged
        self._in_32_bits = {id(tensor) for tensor in in_32_bits}
        self._quantiles: list[torch.Tensor] = []
        self.paged_bytes = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter in place."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.grad = parameter.grad.contiguous()
                if not self.state[parameter]:
                    self._init_state(parameter)
                parameter.mul_(1.0)

    def _init_state(self, parameter: torch.Tensor) -> None:
        state, numel = self.state[parameter], parameter.numel()
        state["step"] = 0
        is_8bit = self._bits == 8 and numel >= SMALLEST_8BIT
        is_8bit = is_8bit and id(parameter) not in self._in_32_bits
        dtype = torch.uint8 if is_8bit else torch.float32
        for number in range(1, self._num_states + 1):
            if self._paged and numel >= SMALLEST_PAGED:
                self.paged_bytes += numel * dtype.itemsize
            else:
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
        if not is_8bit:
            return
        if not self._quantiles:
            self._quantiles = [
                parameter.new_zeros(NUM_QUANTILES, dtype=torch.float32)
                for _ in range(self._num_states)
            ]
        for number, quantiles in enumerate(self._quantiles, start=1):
            state[f"qmap{number}"] = quantiles
            blocks = -(-numel // BLOCK_SIZE)
            state[f"absmax{number}"] = parameter.new_zeros(blocks, dtype=torch.float32)
