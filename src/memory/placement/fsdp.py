"""PyTorch's `fully_shard`: shards between uses, whole blocks while they are at work."""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.counts import Counts, Tensor, trained_tensors
from src.memory.optimizers import state_bytes, temporary_bytes
from src.memory.placement.streams import Streams
from src.memory.placement.whole import Placement
from src.memory.regime import stored_bytes
from src.memory.size import FLOAT_BYTES, Size, fixed
from src.memory.terms import Term
from src.memory.values import Terms, merged
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
        regime = self.regime
        return part.bytes_of(
            dense=regime.parameter_bytes, norm=regime.norm_bytes, adapter=regime.adapter_bytes
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a whole gradient as autograd leaves it."""
        own = self.regime.finetune.trains_weights
        return self.regime.gradient_bytes if own else self.regime.adapter_bytes

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of the reduction (`MixedPrecisionPolicy.reduce_dtype`)."""
        return FLOAT_BYTES if self.job.fp32_reduce else self.gradient_bytes

    @property
    def casts_reduction(self) -> bool:
        """Whether the reduced shard is cast to the stored dtype: then it is a tensor of its own."""
        return self.reduce_bytes != self.trained_bytes

    def _whole_gradients(self, part: Counts) -> float:
        return part.trained * self.gradient_bytes

    def _reduce_input(self, part: Counts) -> float:
        return part.trained * self.reduce_bytes

    def weights(self) -> float:
        """The fullest rank's shards, at the stored dtype."""
        return self._shard(self.counts.all) + self.counts.all.statistics_bytes

    def _shard(self, part: Counts) -> float:
        """The fullest rank's shards of a part, without the scales of quantised weights."""
        dense, norm = stored_bytes(self.job)
        return part.shard_bytes_of(dense=dense, norm=norm, adapter=FLOAT_BYTES)

    def kept_tensors(self) -> tuple[Tensor, ...]:
        """The fullest rank's shards."""
        finetune, layout = self.job.finetune, self.layout
        return trained_tensors(self.decoder, finetune=finetune, tp=layout.tp, shard=layout.shard)

    def kept_gradients(self, part: Counts) -> float:
        """The shard of the reduced gradient, at the stored dtype."""
        return part.trained_shard * self.trained_bytes

    def waiting_gradients(self) -> Terms:
        """Whole: accelerate switches reducing off between micro steps (`no_sync`).

        They wait in the dtype of the reduction (`to_accumulated_grad_if_needed`).
        """
        return {Term.UNSHARDED_GRADIENTS: fixed(self._reduce_input(self.counts.all))}

    def waiting_backward(self, index: int, norm_and_head: float) -> tuple[Terms, ...]:
        """In the last micro step the blocks behind are reduced; in those before, nothing is.

        The first one makes what later ones add to: with two in all, nothing waits whole from the
        start but in the last.
        """
        blocks = self.counts.blocks
        behind, ahead = blocks[index + 1 :], blocks[: index + 1]
        edges = self._reduce_input(self.counts.edges)
        last = merged(
            {
                Term.UNSHARDED_GRADIENTS: fixed(edges + sum(map(self._reduce_input, ahead))),
                Term.GRADIENTS: fixed(sum(map(self.kept_gradients, behind))),
            },
            self.neighbour_buffers(index + 1) if behind else {},
            self.held_reductions(index),
        )
        if self.job.grad_accum > 2:
            return last, self.waiting_gradients()
        made = blocks[max(index, 0) :] if self.regime.accumulates else behind
        whole = sum(map(self._reduce_input, made))
        if self.regime.accumulates:
            whole += norm_and_head * self.gradient_bytes
        return last, {Term.UNSHARDED_GRADIENTS: fixed(whole)}

    def edge_gradients(self, numel: float) -> Terms:
        """Whole until the root reduces them after everything else."""
        return {Term.UNSHARDED_GRADIENTS: fixed(numel * self.gradient_bytes)}

    def gathered_moments(self) -> tuple[tuple[int, Size], ...]:
        """While the first block's weights are gathered, and the last one's."""
        return (0, self.gathered_ahead()), (len(self.counts.blocks) - 1, self.gathered_last())

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

    def gathered_at_work(self) -> Size:
        """The same, and the last block itself."""
        last = 0.0 if self.method is Method.FSDP_GRAD else self._whole(self.counts.blocks[-1])
        return self.gathered_forward().plus(fixed(last))

    def gathered_outputs(self) -> Size:
        """The root (or everything): it frees the held buffer behind its own forward pass.

        Source: `FSDPState._post_forward`, torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
        """
        return fixed(self._whole(self._unfreed()))

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

    def streams(self) -> Streams:
        """All-gather: root and first block, or two blocks, and the cast shards that it sends.

        Reduce-scatter: reduced gradients, and the largest output that is cast to one. Gradients to
        reduce and whole weights are the computing stream's (_fsdp_collectives.py).
        """
        blocks, edges = self.counts.blocks, self._whole(self.counts.edges)
        whole = [self._whole(part) for part in blocks]
        received = max(edges + whole[0], sum(whole[:2]), sum(whole[-2:]))
        casts = stored_bytes(self.job)[0] != self.regime.parameter_bytes
        outputs = max(part.trained_shard for part in blocks) * self.reduce_bytes
        reduced = max(self._root_output(), outputs * self.casts_reduction)
        if self.method is Method.FSDP_GRAD:
            edges = self._whole(self.counts.all)
        return Streams(
            gathered=edges,
            most_gathered=edges + (0 if self.method is Method.FSDP_GRAD else max(whole)),
            most_reduced=max(self._reduce_input(part) for part in (*blocks, self.counts.edges)),
            has_gradients=False,
            sides=received * (1 + casts / self.layout.shard)
            + self.kept_gradients(self.counts.all)
            + reduced,
        )

    def gathered_edges(self) -> Size:
        """The root."""
        return fixed(self._whole(self.counts.edges))

    def neighbour_buffers(self, index: int) -> Terms:
        """A block's reduce-scatter input is held until the next one's turn comes."""
        held = self._reduce_input(self.counts.blocks[index])
        return {Term.COMMUNICATION_BUFFERS: fixed(held)}

    def held_reductions(self, index: int) -> Terms:
        """HSDP holds what each block's all-reduce works on to the end of the backward pass.

        It is the reduce-scatter's output (`AllReduceState`, _fsdp_param_group.py), the gradient
        itself where that is not cast.
        """
        if self.layout.dp == self.layout.shard or not self.casts_reduction:
            return {}
        behind = sum(part.trained_shard for part in self.counts.blocks[index + 1 :])
        return {Term.COMMUNICATION_BUFFERS: fixed(behind * self.reduce_bytes)}

    def sync(self) -> tuple[Terms, ...]:
        """The root's whole gradients and their copy that the reduce-scatter reads; its output then.

        The output arrives in the dtype of the reduction and is cast to the stored one. The root's
        weights have been freed by then. The last tensor's whole gradient is still a local name of
        `foreach_reduce` (_fsdp_collectives.py).
        """
        edges, held = self.counts.edges, self.held_reductions(-1)
        copied = self._reduce_input(edges)
        waits = self.keeps_gradients_between_steps
        blocks = fixed(self.kept_gradients(self.counts.blocks_together))
        whole = copied if waits else self._whole_gradients(edges)
        named = self._last_edge() * (self.reduce_bytes if waits else self.gradient_bytes)
        before = {
            Term.GRADIENTS: blocks,
            Term.UNSHARDED_GRADIENTS: fixed(whole),
            Term.COMMUNICATION_BUFFERS: fixed(copied),
        }
        behind = {
            Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all)),
            Term.UNSHARDED_GRADIENTS: fixed(named),
            Term.COMMUNICATION_BUFFERS: fixed(copied + self._root_output()),
        }
        return merged(before, held), merged(behind, held), *self._cast_to_wait()

    def _cast_to_wait(self) -> tuple[Terms, ...]:
        """Where a micro step before the last one casts the root's gradients, tensor by tensor."""
        if not self.keeps_gradients_between_steps or self.reduce_bytes == self.gradient_bytes:
            return ()
        edges = self.counts.edges
        being_cast = edges.largest * self.gradient_bytes if edges.trained else 0.0
        waiting = self._reduce_input(self.counts.all) + being_cast
        return ({Term.UNSHARDED_GRADIENTS: fixed(waiting)},)

    def _last_edge(self) -> float:
        """Elements of the last trained tensor outside the blocks."""
        finetune, tp = self.job.finetune, self.layout.tp
        tensors = trained_tensors(self.decoder, finetune=finetune, tp=tp)
        return next((tensor.numel for tensor in reversed(tensors) if tensor.is_edge), 0.0)

    def _root_output(self) -> float:
        """The reduce-scatter's output, where it is not the gradient itself."""
        return self.counts.edges.trained_shard * self.reduce_bytes * self.casts_reduction


@dataclass(frozen=True, kw_only=True)
class OffloadedFsdpPlacement(FsdpPlacement):
    """`CPUOffloadPolicy`: shards, reduced gradients and optimizer states live on the host.

    What is gathered is copied to the GPU first, at the stored dtype, and cast there
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `all_gather_inputs`).
    """

    def weights(self) -> float:
        """None on the GPU but the scales of quantised weights, which no shard holds."""
        return self.counts.all.statistics_bytes

    def optimizer_states(self) -> float:
        """None on the GPU: the optimizer runs on the host."""
        return 0.0

    def kept_gradients(self, part: Counts) -> float:
        """A reduced shard goes to the host at once."""
        del part
        return 0.0

    def _root_output(self) -> float:
        """The reduce-scatter's output, and its cast on the way to the host."""
        bytes_ = self.reduce_bytes + self.trained_bytes * self.casts_reduction
        return self.counts.edges.trained_shard * bytes_

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
        stored, cast = stored_bytes(self.job)[0], self.regime.parameter_bytes
        copies = part.base_shard * (stored if cast == stored else stored + cast)
        return fixed(copies + part.packed_shard_bytes + part.adapters_shard * FLOAT_BYTES)

    def host(self) -> Size:
        """Shards, their gradients and states, and the optimizer's own temporaries."""
        kept, bytes_ = self.kept_tensors(), self.trained_bytes
        gradients = super().kept_gradients(self.counts.all)
        states = state_bytes(self.job.optimizer, kept, bytes_)
        temporaries = temporary_bytes(self.job.optimizer, kept, bytes_)
        return fixed(self._shard(self.counts.all) + gradients + states + temporaries)
