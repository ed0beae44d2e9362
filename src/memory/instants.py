"""What can be alive at each instant: one candidate after the other, in the order of the step."""

from __future__ import annotations

from typing import NamedTuple

from src.memory.kernels import Kernel
from src.memory.parts import Parts, loss_bytes
from src.memory.size import FLOAT_BYTES, Size, fixed, per_score, per_token, total
from src.memory.tape import Terms, merged
from src.memory.terms import Instant, Term


class Column(NamedTuple):
    """One candidate for an instant's column."""

    instant: Instant
    terms: Terms
    size: Size


def candidates(parts: Parts) -> list[Column]:
    """Every column that may be an instant's largest, in the order of instants."""
    return [
        *_load(parts),
        *_forward_end(parts),
        *_loss_backward(parts),
        *_block_columns(parts),
        *_embedding_backward(parts),
        *_gradient_sync(parts),
        *_optimizer_step(parts),
    ]


def _column(instant: Instant, *terms: Terms) -> Column:
    joined = merged(*terms)
    return Column(instant, joined, total(joined.values()))


def _load(parts: Parts) -> list[Column]:
    tables = {Term.WEIGHTS: fixed(parts.decoder.buffer_bytes)}
    return [_column(Instant.LOAD, parts.placement.load(), tables)]


def _kept_activations(parts: Parts, *, blocks: int | None = None) -> Terms:
    """Kept once that many blocks (None: all) have run forward, without the head's."""
    kept = [
        {Term.CHECKPOINTS: block.source} if parts.checkpointed else block.saved
        for block in parts.blocks[:blocks]
    ]
    return merged(parts.stem.saved, *kept, _attention_mask(parts))


def _attention_mask(parts: Parts) -> Terms:
    """Eager attention gets an additive S x S mask, SDPA a boolean one where it gets any."""
    if parts.regime.kernel is Kernel.EAGER:
        return {Term.ATTENTION_MASK: per_score(parts.stem.out_bytes)}
    if parts.masked or parts.decoder.attention.explicit_mask:
        return {Term.ATTENTION_MASK: per_score(1)}
    return {}


def _waiting_gradients(parts: Parts) -> Terms:
    """Gradients of earlier micro steps, and buffers that these have left."""
    placement = parts.placement
    if not placement.keeps_gradients_between_steps:
        return {}
    return merged(placement.waiting_gradients(), placement.forward_buffers())


def _forward_end(parts: Parts) -> list[Column]:
    """Inside the loss, and after accelerate has turned the model's outputs to fp32.

    Where weights are sharded, gathering the first or the last ones can need more. Inside the loss,
    the model's code still holds what the final norm gave, also where nothing saves it.
    """
    vocab, regime = parts.decoder.vocab_size, parts.regime
    logits = per_token(vocab * regime.compute_bytes)
    bytes_ = loss_bytes(parts.decoder, regime)
    common = merged(
        parts.static,
        _waiting_gradients(parts),
        _kept_activations(parts),
        parts.head.saved,
        {Term.LOGITS: logits, Term.GATHERED_WEIGHTS: parts.placement.gathered_forward()},
    )
    upcast = per_token(vocab * bytes_ if bytes_ != regime.compute_bytes else 0)
    log_probabilities = per_token(vocab * bytes_)
    cached = _autocast_cache(parts)
    found = [
        *(
            _column(
                Instant.FORWARD_END,
                parts.static,
                _waiting_gradients(parts),
                _kept_activations(parts, blocks=blocks),
                {Term.GATHERED_WEIGHTS: size},
            )
            for blocks, size in parts.placement.gathered_moments()
        ),
        _column(
            Instant.FORWARD_END,
            common,
            cached,
            {
                Term.SAVED_ACTIVATIONS: parts.head.held,
                Term.LOSS_TEMPORARIES: upcast.plus(log_probabilities),
            },
        ),
    ]
    if regime.autocast:
        outputs = {
            Term.LOGITS: per_token(vocab * FLOAT_BYTES),
            Term.LOSS_TEMPORARIES: log_probabilities,
        }
        found.append(_column(Instant.FORWARD_END, common, outputs))
    return found


def _autocast_cache(parts: Parts) -> Terms:
    """Cast copies of trained weights stay cached until autocast is left, recomputed or not."""
    if not (parts.checkpointed and parts.regime.casts_weights and parts.regime.trains_weights):
        return {}
    casts = [block.saved[Term.CAST_WEIGHTS] for block in parts.blocks]
    return {Term.CAST_WEIGHTS: total(casts)}


def _loss_backward(parts: Parts) -> list[Column]:
    """The loss's backward (log-probabilities and two gradients), then the head's and the norm's.

    Buffers that come with the first gradient of a parameter meet the head's own, or the tied one
    that waits, and what the final norm needs.
    """
    placement = parts.placement
    bytes_ = parts.decoder.vocab_size * loss_bytes(parts.decoder, parts.regime)
    common = merged(
        parts.static,
        _waiting_gradients(parts),
        _kept_activations(parts),
        {Term.GATHERED_WEIGHTS: placement.gathered_loss()},
    )
    loss = merged(parts.head.saved, {Term.LOSS_TEMPORARIES: per_token(3 * bytes_)})
    moments = [_with_gradients(parts, moment.terms) for moment in parts.head.moments]
    return [
        *(_column(Instant.LOSS_BACKWARD, common, terms) for terms in (loss, *moments)),
        *_first_gradients(parts, common),
    ]


def _first_gradients(parts: Parts, common: Terms) -> list[Column]:
    placement, buffers = parts.placement, parts.placement.backward_buffers()
    if not buffers or placement.forward_buffers() or not parts.regime.trains_weights:
        return []
    waiting = merged(common, buffers, _fresh_edge_gradients(parts))
    source = parts.decoder.hidden_size * parts.regime.compute_bytes
    head = {
        Term.UNSHARDED_GRADIENTS: fixed(placement.head_gradient()),
        Term.ACTIVATION_GRADIENTS: per_token(source),
    }
    return [
        _column(Instant.LOSS_BACKWARD, waiting, terms)
        for terms in (head, *(moment.terms for moment in parts.tail.moments))
    ]


def _with_gradients(parts: Parts, terms: Terms) -> Terms:
    """A moment's terms, its fresh gradients under the term that the method keeps them in."""
    renamed = dict(terms)
    fresh = renamed.pop(Term.UNSHARDED_GRADIENTS, None)
    if fresh is None:
        return renamed
    return merged(renamed, {parts.placement.gradient_term: fresh})


def _edge_gradients(parts: Parts) -> Terms:
    """Gradients of the head and the final norm, which stay while blocks run backward."""
    if not parts.regime.trains_weights:
        return {}
    return parts.placement.edge_gradients(_norm_and_head(parts) + parts.tied_head)


def _norm_and_head(parts: Parts) -> float:
    """Trained elements of the final norm and of the head; a tied head has none of its own."""
    if not parts.regime.trains_weights:
        return 0.0
    return parts.decoder.tail.num_parameters + parts.decoder.head.num_parameters


def _fresh_edge_gradients(parts: Parts) -> Terms:
    """What of the head's new gradients waits beside those of earlier micro steps.

    That of a tied weight, which waits for the embedding's to be added to it.
    """
    if not parts.regime.accumulates:
        return _edge_gradients(parts)
    if not parts.regime.trains_weights:
        return {}
    return parts.placement.edge_gradients(parts.tied_head)


def _block_columns(parts: Parts) -> list[Column]:
    """The blocks' backward pass: for each kind of block its last and first, and the second of all.

    Between two blocks of a kind bytes are linear in the block's number. The first block has no
    neighbour whose weights are gathered ahead, so the one behind it can need more; nor has the last
    one a neighbour that left buffers.
    neighbour whose weights are gathered ahead, so the one behind it can need more. Where gradients
    are collected, so can blocks during whose backward pass they are reduced.
    """
    kinds = list(parts.blocks)
    ends = {kinds.index(kind) for kind in kinds}
    ends |= {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
    ends |= {min(1, len(kinds) - 1)}
    if parts.placement.neighbour_buffers(0):
        ends |= {max(len(kinds) - 2, 0)}
    ends |= {index for index in parts.placement.reducing_blocks if index < len(kinds)}
    found: list[Column] = []
    for index in sorted(ends):
        found += _block_backward(parts, index)
    return found


def _block_backward(parts: Parts, index: int) -> list[Column]:
    """Every moment of one block's backward pass."""
    placement, last = parts.placement, index == len(parts.blocks) - 1
    late = index >= len(parts.blocks) / 2 or last
    block, earlier = parts.blocks[index], parts.blocks[:index]
    if parts.checkpointed:
        activations = [{Term.CHECKPOINTS: other.source} for other in (*earlier, block)]
    else:
        activations = [other.saved for other in earlier]
    common = merged(
        parts.static,
        placement.backward_buffers(),
        {Term.GATHERED_WEIGHTS: placement.gathered_backward(index)},
        placement.reducing(index),
        parts.stem.saved,
        _attention_mask(parts),
        *activations,
    )
    instant = Instant.LAST_BLOCK_BACKWARD if late else Instant.FIRST_BLOCK_BACKWARD
    return [
        _column(instant, common, gradients, _with_gradients(parts, moment.terms))
        for gradients in _gradients_behind(parts, index)
        for moment in block.moments
    ]


def _gradients_behind(parts: Parts, index: int) -> tuple[Terms, ...]:
    """What is there of gradients when the backward pass reaches block `index`; alternatives.

    -1: the embeddings.
    """
    placement, behind = parts.placement, parts.counts.blocks[index + 1 :]
    reduced = {Term.GRADIENTS: fixed(placement.reduced_gradients(index))}
    fresh = merged(_fresh_edge_gradients(parts), reduced)
    if placement.keeps_gradients_between_steps:
        waiting = placement.waiting_backward(index, _norm_and_head(parts))
        return tuple(merged(terms, fresh) for terms in waiting)
    done = merged(
        fresh,
        {Term.GRADIENTS: fixed(sum(map(placement.kept_gradients, behind)))},
        placement.neighbour_buffers(index + 1) if behind else {},
        placement.held_reductions(index),
    )
    return (done,)


def _embedding_backward(parts: Parts) -> list[Column]:
    """The embeddings' gradients arrive, behind the first block's.

    One that does not fit beside collected ones waits until these are reduced.
    """
    placement = parts.placement
    common = merged(
        parts.static,
        placement.backward_buffers(),
        {Term.GATHERED_WEIGHTS: placement.gathered_edges()},
    )
    instant, behind = Instant.FIRST_BLOCK_BACKWARD, _gradients_behind(parts, -1)
    found = [
        _column(instant, common, gradients, _with_gradients(parts, moment.terms))
        for gradients in behind
        for moment in parts.stem.moments
    ]
    if placement.reducing(-1):
        table = {Term.UNSHARDED_GRADIENTS: fixed(placement.table_gradient())}
        terms = merged(placement.reducing(-1), table)
        found += [_column(instant, common, gradients, terms) for gradients in behind]
    return found


def _gradient_sync(parts: Parts) -> list[Column]:
    """All gradients, and what reducing the last of them needs."""
    return [
        _column(Instant.GRADIENT_SYNC, parts.static, parts.placement.backward_buffers(), terms)
        for terms in parts.placement.sync()
    ]


def _optimizer_step(parts: Parts) -> list[Column]:
    return [
        _column(Instant.OPTIMIZER_STEP, parts.static, terms) for terms in parts.placement.steps()
    ]
