"""PyTorch's `fully_shard`: shards between uses, whole blocks while they are at work."""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.counts import Counts, Tensor, trained_tensors
from src.memory.optimizers import state_bytes, temporary_bytes
from src.memory.placement.whole import Placement
from src.memory.size import FLOAT_BYTES, Size, fixed
from src.memory.tape import Terms
from src.memory.terms import Term
from src.spec import Method


@dataclass(frozen=True, kw_only=True)
class FsdpPlacement(Placement):
    """`fully_shard` on each block and the root (PyTorch FSDP2), as accelerate sets it up.

    Parameters, gradients and states are split along each tensor's first dimension. Whole weights of
    a block are gathered for its forward and backward pass, the next block's ahead of it; the root
    (embeddings, norm, head) stays whole from its forward to the end of the backward pass.
    """

    @property
    def gradient_term(self) -> Term:
        """A block's fresh gradients are whole."""
        return Term.UNSHARDED_GRADIENTS

    def _whole(self, part: Counts) -> float:
        """A part gathered in the dtype that computes."""
        return part.base * self.regime.parameter_bytes + part.adapters * self.regime.adapter_bytes

    def _whole_gradients(self, part: Counts) -> float:
        base = part.base * self.regime.gradient_bytes if part.trains_base else 0
        return base + part.adapters * self.regime.adapter_bytes

    def weights(self) -> float:
        """The fullest rank's shards, at the stored dtype."""
        base = self.counts.all.base_shard * self.job.precision.weight_bytes
        return base + self.counts.all.adapters_shard * FLOAT_BYTES

    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The fullest rank's shards."""
        finetune, layout = self.job.finetune, self.layout
        return trained_tensors(self.decoder, finetune=finetune, tp=layout.tp, shard=layout.shard)

    def kept_gradients(self, part: Counts) -> float:
        """The shard of the reduced gradient, at the stored dtype."""
        return part.trained_shard * self.trained_bytes

    def waiting_gradients(self) -> Terms:
        """Whole: accelerate switches reducing off between micro steps (`no_sync`)."""
        return {Term.UNSHARDED_GRADIENTS: fixed(self._whole_gradients(self.counts.all))}

    def edge_gradients(self, numel: float) -> Terms:
        """Whole until the root reduces them after everything else."""
        return {Term.UNSHARDED_GRADIENTS: fixed(numel * self.regime.gradient_bytes)}

    def gathered_ahead(self) -> Size:
        """Root and first block, each whole and in the buffer that its all-gather filled."""
        return fixed(2 * (self._whole(self.counts.edges) + self._whole(self.counts.blocks[0])))

    def gathered_last(self) -> Size:
        """The root (or everything), the last block, its buffer, and the buffer of the one before.

        A buffer is held until the next all-gather has been copied out of its own.
        """
        buffers = sum(self._whole(part) for part in self.counts.blocks[-2:])
        if self.method is Method.FSDP_GRAD:
            return fixed(self._whole(self.counts.all) + buffers)
        last = self._whole(self.counts.blocks[-1])
        return fixed(self._whole(self.counts.edges) + last + buffers)

    def gathered_forward(self) -> Size:
        """The root (or everything), and the last all-gather's buffer, held until the next one."""
        held = self._whole(self.counts.blocks[-1])
        return fixed(self._whole(self._unfreed()) + held)

    def gathered_loss(self) -> Size:
        """The same; where nothing is gathered again, the held buffer is gone."""
        if self.method is Method.FSDP_GRAD:
            return fixed(self._whole(self.counts.all))
        return self.gathered_forward()

    def _unfreed(self) -> Counts:
        return self.counts.all if self.method is Method.FSDP_GRAD else self.counts.edges

    def gathered_backward(self, index: int) -> Size:
        """The root, the block at work, and the all-gather buffer of the one that comes next.

        Without resharding after the forward pass, every block up to the one at work.
        """
        blocks = self.counts.blocks
        first = 0 if self.method is Method.FSDP_GRAD else max(index - 1, 0)
        whole = sum(self._whole(part) for part in blocks[first : index + 1])
        return fixed(self._whole(self.counts.edges) + whole)

    def gathered_edges(self) -> Size:
        """The root."""
        return fixed(self._whole(self.counts.edges))

    def neighbour_buffers(self, index: int) -> Terms:
        """A block's reduce-scatter input is held until the next one's turn comes."""
        held = self._whole_gradients(self.counts.blocks[index])
        return {Term.COMMUNICATION_BUFFERS: fixed(held)}

    def sync(self) -> tuple[Terms, ...]:
        """The root's whole gradients and their copy that the reduce-scatter reads; its output then.

        The output arrives in the dtype of the reduction and is cast to the stored one. The root's
        weights have been freed by then.
        """
        edges = self.counts.edges
        whole = self._whole_gradients(edges)
        reduced = edges.trained_shard * self.regime.gradient_bytes
        blocks = fixed(self.kept_gradients(self.counts.blocks_together))
        return (
            {
                Term.GRADIENTS: blocks,
                Term.UNSHARDED_GRADIENTS: fixed(whole),
                Term.COMMUNICATION_BUFFERS: fixed(whole),
            },
            {
                Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all)),
                Term.COMMUNICATION_BUFFERS: fixed(whole + reduced),
            },
        )


@dataclass(frozen=True, kw_only=True)
class OffloadedFsdpPlacement(FsdpPlacement):
    """`CPUOffloadPolicy`: shards, reduced gradients and optimizer states live on the host.

    What is gathered is copied to the GPU first, at the stored dtype, and cast there
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `all_gather_inputs`).
    """

    def weights(self) -> float:
        """None on the GPU."""
        return 0.0

    def optimizer_states(self) -> float:
        """None on the GPU: the optimizer runs on the host."""
        return 0.0

    def kept_gradients(self, part: Counts) -> float:
        """A reduced shard goes to the host at once."""
        del part
        return 0.0

    def step(self) -> Terms:
        """Nothing on the GPU."""
        return {}

    def gathered_ahead(self) -> Size:
        """The same, and the first block's shard on its way to the all-gather."""
        return super().gathered_ahead().plus(self._on_its_way(self.counts.blocks[0]))

    def gathered_last(self) -> Size:
        """The same, and the last block's shard on its way to the all-gather."""
        return super().gathered_last().plus(self._on_its_way(self.counts.blocks[-1]))

    def _on_its_way(self, part: Counts) -> Size:
        stored = part.base_shard * self.job.precision.weight_bytes
        cast = part.base_shard * self.regime.parameter_bytes
        copies = stored if cast == stored else stored + cast
        return fixed(copies + part.adapters_shard * FLOAT_BYTES)

    def host(self) -> Size:
        """Shards, their gradients and states, and the optimizer's own temporaries."""
        kept, bytes_ = self.kept_tensors(), self.trained_bytes
        gradients = super().kept_gradients(self.counts.all)
        states = state_bytes(self.job.optimizer, kept, bytes_)
        temporaries = temporary_bytes(self.job.optimizer, kept, bytes_)
        return fixed(super().weights() + gradients + states + temporaries)
