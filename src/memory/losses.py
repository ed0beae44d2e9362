"""Head and loss: what each kind of loss keeps, and what it needs while it runs.

Letters: B, S; T = B*S tokens, D hidden size, V vocabulary, C tokens of a chunk. Sources:
transformers' `loss_utils.py` (5.x and 4.48), PyTorch's `cross_entropy`; Liger-Kernel 0.8.5's
`fused_linear_cross_entropy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from src.architecture import Block, Decoder
from src.architecture.losses import UPCASTS_4X, Upcast4x
from src.architecture.ops import Norm
from src.memory.lowering import Lowering
from src.memory.profile import Profile, profile, profile_of
from src.memory.regime import Regime
from src.memory.size import FLOAT_BYTES, ZERO, Size, fixed, per_token
from src.memory.tape import Tape
from src.memory.terms import Term
from src.memory.values import Terms, Value, merged
from src.spec import Loss

NUM_CHUNKS = 8
"""Runs of tokens of the chunked loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Final norm, head and loss under one regime.

    Attributes:
        profile: what they keep, and the moments of their backward pass.
        inside: alternatives of what is alive besides while the loss runs.
        outputs: once accelerate has turned the model's outputs to fp32; None where nothing changes.
        backward: the loss's own backward, before the head's; None where it is among the moments.
        weight_gradient: bytes of the head's gradient, where the forward pass makes it.
        saved_by_loss: what the loss itself saves, each tensor as often as it is saved.
    """

    profile: Profile
    inside: tuple[Terms, ...]
    outputs: Terms | None = None
    backward: Terms | None = None
    weight_gradient: Size = ZERO
    saved_by_loss: Size = ZERO


def head_of(
    decoder: Decoder,
    regime: Regime,
    source_bytes: int,
    *,
    capability: tuple[int, int],
    share: float = 1.0,
    gathers: bool = False,
) -> Head:
    """The head of a model.

    Args:
        decoder: the model.
        regime: without tensor parallelism, which leaves the head whole.
        source_bytes: bytes per element of the last block's output.
        capability: the GPU's compute capability.
        share: the part of the sequence that the last block's output holds.
        gathers: whether it is gathered behind the final norm.
    """
    stream = _Stream(decoder, regime, source_bytes, share, gathers)
    if regime.loss is Loss.CHUNKED:
        return _chunked(stream)
    if regime.loss is Loss.LIGER:
        return _liger(stream, capability)
    return _whole(stream)


class _Stream(NamedTuple):
    """What comes out of the last block; arguments as in `head_of`."""

    decoder: Decoder
    regime: Regime
    source_bytes: int
    share: float
    gathers: bool

    def profile(self, run: tuple[Block, ...], *, out_bytes: int | None = None) -> Profile:
        """Of what follows the last block; gathered behind the norm, or first where there is none.

        Args:
            run: of it.
            out_bytes: bytes per element that the result is cast to; None: as it comes.
        """
        behind = int(any(isinstance(op, Norm) for op in self.decoder.tail.ops))
        return profile(
            run,
            self.regime,
            width=self.decoder.hidden_size,
            source_bytes=self.source_bytes,
            source_counted=True,
            out_bytes=out_bytes,
            share=self.share,
            gathers_at=behind if self.gathers else None,
        )


def num_chunks(decoder: Decoder, loss: Loss) -> int:
    """Chunks that the loss aims at, of a power of two tokens each: Liger's `cdiv(V, D)`."""
    if loss is not Loss.LIGER:
        return 1
    return -(-decoder.vocab_size // decoder.lm_head.in_features)


def _whole(stream: _Stream) -> Head:
    """Logits of all tokens.

    Inside the loss: the logits, their fp32 copy, for 4.x the shifted copy, and log-probabilities;
    backward: log-probabilities, their gradient, and that of what the cross entropy read. Half
    precision logits under autocast have log-probabilities of their own dtype (`cross_entropy` asks
    for it), which `nll_loss` casts to fp32.
    """
    decoder, regime = stream.decoder, stream.regime
    compute, is_4x = regime.logits_bytes, regime.loss is Loss.STANDARD_4X
    upcast = UPCASTS_4X[decoder.model_type] if is_4x else Upcast4x.COPY
    read = compute if upcast is Upcast4x.NONE else FLOAT_BYTES
    in_fp32 = upcast in (Upcast4x.IN_PLACE, Upcast4x.ROUND_TRIP)
    copies, shifted = 0, read if is_4x else 0
    if upcast is Upcast4x.COPY:
        copies += _unless(FLOAT_BYTES, compute)
    elif upcast is Upcast4x.ROUND_TRIP and not regime.autocast:
        copies += _unless(compute, FLOAT_BYTES)
    log_bytes, again = read, 0
    if regime.autocast and read != FLOAT_BYTES:
        log_bytes, again = FLOAT_BYTES, read
    vocab = decoder.vocab_size
    outputs = None
    if regime.autocast and not in_fp32:
        outputs = {
            Term.LOGITS: per_token(vocab * (compute + FLOAT_BYTES)),
            Term.LOSS_TEMPORARIES: per_token(vocab * (again + log_bytes)),
        }
    return Head(
        profile=stream.profile((decoder.tail, decoder.head), out_bytes=read),
        inside=(
            {
                Term.LOGITS: per_token(vocab * (FLOAT_BYTES if in_fp32 else compute)),
                Term.LOSS_TEMPORARIES: Size(
                    per_token=vocab * (copies + again + log_bytes), per_sliced=vocab * shifted
                ),
            },
        ),
        outputs=outputs,
        backward={Term.LOSS_TEMPORARIES: per_token(vocab * (2 * log_bytes + (again or read)))},
        saved_by_loss=per_token(vocab * (log_bytes + (again or log_bytes))),
    )


def _unless(num_bytes: int, same: int) -> int:
    """Bytes of a copy in a dtype; none where the tensor has that dtype."""
    return 0 if num_bytes == same else num_bytes


@dataclass(kw_only=True)
class _ChunkLowering(Lowering):
    """Lowers the head once a chunk, over the same weights.

    Each chunk's gradient of a weight is the transposed view that its matrix multiply gave; two of
    them are added into a third tensor.

    Attributes:
        shared: the weights by their size and dtype.
    """

    shared: dict[tuple[float, int | None], Value] = field(default_factory=dict)

    def weight(self, numel: float, *, trained: bool, stored_bytes: int | None = None) -> Value:
        """This chunk's transposed view of a weight."""
        key = (numel, stored_bytes)
        if key not in self.shared:
            made = super().weight(numel, trained=trained, stored_bytes=stored_bytes)
            if made.is_parameter:
                summed = replace(made, is_parameter=False)
                self.tape.record(summed, [made], passed=[made])
                made = summed
            self.tape.add_apart(made)
            self.shared[key] = made
        view = replace(self.shared[key])
        self.tape.record(view, [self.shared[key]], passed=[self.shared[key]])
        return view


def _chunked(stream: _Stream) -> Head:
    """Logits of one chunk at a time, in a checkpointed function that keeps the hidden states."""
    decoder, regime = stream.decoder, stream.regime
    tape = Tape(offloads=regime.offloads)
    source = tape.tensor(
        decoder.hidden_size * stream.share, stream.source_bytes, share=stream.share
    )
    low = _ChunkLowering(regime=regime, tape=tape, hidden_bytes=stream.source_bytes)
    hidden = low.run(decoder.tail, source)
    if stream.gathers:
        hidden = low.joined(hidden)
    losses = []
    pieces = tape.pieces(hidden, NUM_CHUNKS)
    tape.token_share = 1 / NUM_CHUNKS
    for piece in pieces:
        with tape.checkpointed([piece]):
            logits = low.cast(low.run(decoder.head, piece), FLOAT_BYTES)
            probabilities = tape.tensor(logits.width, FLOAT_BYTES, term=Term.LOSS_TEMPORARIES)
            tape.record(probabilities, [logits], saved=[probabilities])
            loss = tape.tensor(0, FLOAT_BYTES)
            tape.record(loss, [probabilities], saved=[probabilities])
            losses.append(loss)
    mean = tape.tensor(0, FLOAT_BYTES)
    tape.record(mean, losses)
    part = decoder.vocab_size / NUM_CHUNKS
    running = {
        Term.LOGITS: per_token(part * FLOAT_BYTES),
        Term.LOSS_TEMPORARIES: per_token(part * FLOAT_BYTES),
    }
    inside: tuple[Terms, ...] = (running,)
    casts = tape.recomputed().get(Term.CAST_WEIGHTS)
    if casts is not None and not regime.trains_weights:
        logits_alone = {Term.LOGITS: per_token(part * regime.compute_bytes)}
        inside = (running, {**logits_alone, Term.CAST_WEIGHTS: casts})
    return Head(profile=profile_of(tape, source, hidden, mean), inside=inside)


def _liger(stream: _Stream, capability: tuple[int, int]) -> Head:
    """Gradients of hidden states and head in the forward pass, from C tokens' logits at a time.

    Kept: both gradients. Besides, while it runs: the chunk's logits, over which their gradient is
    written; where autocast casts, the chunk's input, and the weight once for each product that
    reads it (the first through a view, which is not cached); else a buffer that all chunks share.
    """
    decoder, regime = stream.decoder, stream.regime
    tail = stream.profile((decoder.tail,))
    width, vocab = decoder.lm_head.in_features, decoder.vocab_size
    compute, stored = regime.logits_bytes, regime.parameter_bytes
    weight = fixed(vocab * width * regime.gradient_bytes) if regime.trains_weights else ZERO
    hidden = per_token(width * tail.out_bytes)
    kept = {
        Term.GRADIENTS: weight,
        Term.ACTIVATION_GRADIENTS: hidden.plus(per_token(FLOAT_BYTES)),
        Term.LOGITS: Size(per_row=vocab * compute),
    }
    cast = fixed(vocab * width * compute if regime.casts_weights else 0)
    reuses = tail.out_bytes == stored == compute
    taken = Size(per_row=0 if tail.out_bytes == compute else width * compute)
    first = {
        Term.CAST_WEIGHTS: cast.times(2 if regime.trains_weights else 1),
        Term.LOSS_TEMPORARIES: taken,
    }
    second = {
        Term.CAST_WEIGHTS: cast,
        Term.LOSS_TEMPORARIES: ZERO if reuses else Size(per_row=width * compute),
    }
    inside = [merged(kept, first), merged(kept, second)]
    if regime.trains_weights and (capability < (8, 0) or compute == FLOAT_BYTES):
        product = vocab * width * (compute + (FLOAT_BYTES if compute != FLOAT_BYTES else 0))
        third = {Term.CAST_WEIGHTS: cast, Term.LOSS_TEMPORARIES: taken.plus(fixed(product))}
        inside.append(merged(kept, third))
    return Head(
        profile=tail,
        inside=tuple(inside),
        weight_gradient=weight,
        saved_by_loss=hidden.plus(weight),
    )
