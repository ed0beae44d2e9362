"""DeepSpeed's `BF16_Optimizer`: what stage 1 becomes with bf16 weights and fp32 gradients.

Source: `deepspeed/runtime/bf16_optimizer.py` and `engine.py` (`_do_optimizer_sanity_check`),
release 0.19.8, and runs of it. Letters as in `zero.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.counts import Counts
from src.memory.optimizers import temporary_bytes
from src.memory.placement.zero import ZeroPlacement
from src.memory.size import FLOAT_BYTES, fixed
from src.memory.terms import Term
from src.memory.values import Terms


@dataclass(frozen=True, kw_only=True)
class Bf16Placement(ZeroPlacement):
    """A flat fp32 gradient of the whole model, all the time, beside the bf16 ones; no bucket."""

    @property
    def waiting_bytes(self) -> int:
        """bf16 gradients live until the optimizer has stepped."""
        return self.model_bytes

    def static(self) -> Terms:
        """As stage 1, and `4 T` of gradients."""
        padded = self.partition * self.layout.shard
        return {**super().static(), Term.UNSHARDED_GRADIENTS: fixed(FLOAT_BYTES * padded)}

    def backward_buffers(self) -> Terms:
        """None."""
        return {}

    def kept_gradients(self, part: Counts) -> float:
        """bf16."""
        return part.trained * self.model_bytes

    def sync(self) -> tuple[Terms, ...]:
        """One gradient after the other in fp32, then all of them in the dtype of the reduction."""
        reduced = self.reduced_bytes * self.trained if self.reduced_bytes != FLOAT_BYTES else 0
        return (
            {
                Term.GRADIENTS: fixed(self.trained * self.model_bytes),
                Term.COMMUNICATION_BUFFERS: fixed(max(FLOAT_BYTES * self.largest, reduced)),
            },
        )

    def steps(self) -> tuple[Terms, ...]:
        """The optimizer reads a part of the flat gradient; the bf16 ones are still there."""
        own = temporary_bytes(self.job.optimizer, self.kept_tensors(), FLOAT_BYTES)
        return (
            {
                Term.GRADIENTS: fixed(self.trained * self.model_bytes),
                Term.OPTIMIZER_TEMPORARIES: fixed(own),
            },
        )

    def reduced_gradients(self, index: int) -> float:
        """In the flat gradient."""
        del index
        return 0.0
