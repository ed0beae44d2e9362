"""Everything whole on every GPU (`single`, `ddp`, `tp`): what the other placements start from.

Letters: P parameters on this GPU, Pt trained ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from src.architecture import Decoder
from src.memory.counts import Counts, ModelCounts, Tensor, trained_tensors
from src.memory.optimizers import paged_bytes, state_bytes, temporary_bytes
from src.memory.placement.streams import Streams
from src.memory.regime import Regime, stored_bytes
from src.memory.size import FLOAT_BYTES, ZERO, Size, fixed
from src.memory.terms import Term
from src.memory.values import Terms
from src.spec import Job, Layout, Method


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One GPU's share of the training state; the plain case: everything whole (`single`, `tp`).

    Attributes:
        decoder, job, method, layout, regime, counts: what it follows from.
    """

    decoder: Decoder
    job: Job
    method: Method
    layout: Layout
    regime: Regime
    counts: ModelCounts

    @property
    def trained_bytes(self) -> int:
        """Bytes per element of stored trained parameters; what PEFT adds is fp32."""
        if not self.regime.finetune.trains_weights:
            return FLOAT_BYTES
        return self.job.precision.weight_bytes

    @property
    def gradient_term(self) -> Term:
        """Whether a block's fresh gradients are already those that this GPU keeps."""
        return Term.GRADIENTS

    def weights(self) -> float:
        """`P * stored bytes`, adapters at theirs; quantised weights with their scales."""
        dense, norm = stored_bytes(self.job)
        part = self.counts.all
        whole = part.bytes_of(dense=dense, norm=norm, adapter=FLOAT_BYTES)
        return whole + part.statistics_bytes

    def kept_tensors(self) -> tuple[Tensor, ...]:
        """Every trained tensor as this GPU keeps it, in the model's order."""
        return trained_tensors(self.decoder, finetune=self.job.finetune, tp=self.layout.tp)

    def optimizer_states(self) -> float:
        """See `state_bytes`."""
        return state_bytes(self.job.optimizer, self.kept_tensors(), self.trained_bytes)

    def host(self) -> Size:
        """Bytes in host memory: paged optimizer states."""
        return fixed(paged_bytes(self.job.optimizer, self.kept_tensors()))

    def static(self) -> Terms:
        """Alive at every instant of the step."""
        terms = {
            Term.WEIGHTS: fixed(self.weights()),
            Term.OPTIMIZER_STATES: fixed(self.optimizer_states()),
        }
        if self.method.has_ddp:
            terms[Term.COMMUNICATION_BUFFERS] = fixed(self.ddp_buckets())
        return terms

    def ddp_buckets(self) -> float:
        """One gradient-sized buffer in all (`gradient_as_bucket_view` is off by default)."""
        return self.counts.all.trained * self.trained_bytes

    def streams(self) -> Streams:
        """What lies in other streams' pools: nothing."""
        return Streams()

    def load(self) -> Terms:
        """The weights as they arrive, before the wrapper and the optimizer exist."""
        return {Term.WEIGHTS: fixed(self.weights())}

    def backward_buffers(self) -> Terms:
        """Buffers that live from the backward pass's first gradient of a parameter to its end."""
        return {}

    def forward_buffers(self) -> Terms:
        """Those of them that an earlier micro step has left."""
        return {}

    def head_gradient(self) -> float:
        """Bytes of the head's gradient where it comes before the buffers."""
        return 0.0

    def table_gradient(self) -> float:
        """Bytes of the token embedding's gradient, unless it waits as the head's."""
        return 0.0

    @property
    def reducing_blocks(self) -> frozenset[int]:
        """Blocks during whose backward pass gradients are reduced that have been collected."""
        return frozenset()

    def reducing(self, index: int) -> Terms:
        """What that takes while block `index` is at work; -1: the embeddings."""
        del index
        return {}

    def reduced_gradients(self, index: int) -> float:
        """What is kept of collected gradients that were reduced before block `index` is at work."""
        del index
        return 0.0

    def kept_gradients(self, part: Counts) -> float:
        """What stays of a part's gradients once its backward pass is over."""
        return part.trained * self.trained_bytes

    def waiting_gradients(self) -> Terms:
        """Gradients of earlier micro steps, where they accumulate."""
        return {Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all))}

    def waiting_backward(self, index: int, norm_and_head: float) -> tuple[Terms, ...]:
        """The same when the backward pass reaches block `index` (-1: the embeddings).

        Alternatives: what waits can differ from micro step to micro step.

        Args:
            index: the block.
            norm_and_head: trained elements of the final norm and of a head of its own.
        """
        del index, norm_and_head
        return (self.waiting_gradients(),)

    def held_reductions(self, index: int) -> Terms:
        """What reducing the gradients of the blocks behind block `index` leaves behind."""
        del index
        return {}

    def edge_gradients(self, numel: float) -> Terms:
        """Gradients of head and final norm (`numel` trained elements) while blocks run backward."""
        return {Term.GRADIENTS: fixed(numel * self.trained_bytes)}

    def gathered_moments(self) -> tuple[tuple[int, Size], ...]:
        """Moments of the forward pass when more is gathered than at its end.

        Returns:
            Blocks that have run, and bytes of whole weights.
        """
        return ()

    def gathered_at_work(self) -> Size:
        """Whole weights alive while the last block runs forward, where they are sharded."""
        return ZERO

    def gathered_forward(self) -> Size:
        """Whole weights alive at the end of the forward pass, where they are sharded."""
        return ZERO

    def gathered_outputs(self) -> Size:
        """Whole weights alive once the forward pass is over, and its outputs are looked at."""
        return self.gathered_forward()

    def gathered_loss(self) -> Size:
        """Whole weights alive when the backward pass begins."""
        return self.gathered_forward()

    def gathered_backward(self, index: int) -> Size:
        """Whole weights alive while block `index` runs backward."""
        del index
        return ZERO

    def gathered_edges(self) -> Size:
        """Whole weights alive when the embeddings' gradients arrive."""
        return ZERO

    def neighbour_buffers(self, index: int) -> Terms:
        """Communication buffers that block `index` leaves behind when the backward pass goes on."""
        del index
        return {}

    def sync(self) -> tuple[Terms, ...]:
        """Gradients and buffers while the last gradients are reduced; alternatives."""
        return ({Term.GRADIENTS: fixed(self.kept_gradients(self.counts.all))},)

    def step(self) -> Terms:
        """The optimizer's own temporaries: see `temporary_bytes`."""
        bytes_ = temporary_bytes(self.job.optimizer, self.kept_tensors(), self.trained_bytes)
        return {Term.OPTIMIZER_TEMPORARIES: fixed(bytes_)} if bytes_ else {}

    def steps(self) -> tuple[Terms, ...]:
        """Gradients and temporaries while the optimizer is called; alternatives."""
        return ({Term.GRADIENTS: fixed(self.gradients_at_step()), **self.step()},)

    def gradients_at_step(self) -> float:
        """Gradients alive while the optimizer runs."""
        return self.kept_gradients(self.counts.all)

    @property
    def keeps_gradients_between_steps(self) -> bool:
        """Whether gradients are alive in the forward pass: when micro steps accumulate."""
        return self.job.grad_accum > 1
