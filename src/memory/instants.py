"""What can be alive at each instant: one candidate after the other, in the order of the step."""

from __future__ import annotations

from typing import NamedTuple

from src.memory.kernels import Kernel
from src.memory.parts import Parts
from src.memory.size import ZERO, Size, fixed, per_score, per_token, total
from src.memory.terms import Instant, Term
from src.memory.tuning import trains_block
from src.memory.values import Terms, merged


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
    kept = _kept_of(parts)[:blocks]
    retained = [part.retained for part in (parts.stem, *parts.blocks[:blocks])]
    return merged(parts.stem.saved, *kept, *retained, _attention_mask(parts))


def _kept_of(parts: Parts) -> list[Terms]:
    """Kept of each block: its input where it is recomputed, else what its nodes save.

    Nothing of either where that waits in host memory.
    """
    share = 0 if parts.regime.offloads else 1
    return [
        {Term.CHECKPOINTS: block.source.times(share)} if parts.recomputes(index) else block.saved
        for index, block in enumerate(parts.blocks)
    ]


def _retained(parts: Parts) -> Terms:
    """What the graph retains to the end of the backward pass."""
    every = (parts.stem, *parts.blocks, parts.head.profile)
    return merged(*[part.retained for part in every if part.retained])


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
    common = merged(
        parts.static,
        _waiting_gradients(parts),
        _kept_activations(parts),
        parts.head.profile.saved,
        parts.head.profile.retained,
    )
    gathered = {Term.GATHERED_WEIGHTS: parts.placement.gathered_forward()}
    held = {Term.SAVED_ACTIVATIONS: parts.head.profile.held}
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
        *_crowded(parts),
        *(
            _column(Instant.FORWARD_END, common, gathered, cached, held, _kept_as(parts, terms))
            for terms in parts.head.inside
        ),
    ]
    if parts.head.outputs is not None:
        gathered = {Term.GATHERED_WEIGHTS: parts.placement.gathered_outputs()}
        found.append(_column(Instant.FORWARD_END, common, gathered, parts.head.outputs))
    return found


def _crowded(parts: Parts) -> list[Column]:
    """Moments of the forward pass of blocks; of alike ones the last, when most is kept."""
    gathered = {Term.GATHERED_WEIGHTS: parts.placement.gathered_at_work()}
    common = merged(parts.static, _waiting_gradients(parts), gathered, _named_stem(parts))
    last = {id(block): index for index, block in enumerate(parts.blocks)}
    return [
        _column(Instant.FORWARD_END, common, _kept_activations(parts, blocks=index), moment.terms)
        for index in last.values()
        for moment in parts.blocks[index].crowded
    ]


def _named_stem(parts: Parts) -> Terms:
    """The embeddings' output, a local name of the model's forward, unless it is kept anyway."""
    first = parts.blocks[0]
    kept = parts.recomputes(0) or (first.saves_source and not parts.regime.offloads)
    return {} if kept else {Term.ACTIVATION_GRADIENTS: parts.stem.out}


def _autocast_cache(parts: Parts) -> Terms:
    """Cast copies of trained weights stay cached until autocast is left, recomputed or not."""
    finetune, count = parts.regime.finetune, len(parts.blocks)
    if not (finetune.trains_weights and parts.regime.casts_weights):
        return {}
    casts = [parts.head.profile.recast] if finetune.trains_everything else []
    for index, block in enumerate(parts.blocks):
        if trains_block(finetune, index, count):
            again = parts.recomputes(index)
            casts.append(block.saved[Term.CAST_WEIGHTS] if again else block.recast)
    return {Term.CAST_WEIGHTS: total(casts)}


def _loss_backward(parts: Parts) -> list[Column]:
    """The loss's backward, then the head's and the norm's.

    Buffers that come with the first gradient of a parameter meet the head's own, or the tied one
    that waits, and what the final norm needs.
    """
    head, fresh = parts.head, parts.head.weight_gradient
    if parts.regime.accumulates and not parts.regime.tied:
        fresh = ZERO
    common = merged(
        parts.static,
        _waiting_gradients(parts),
        _kept_activations(parts),
        parts.head.profile.retained,
        {Term.GATHERED_WEIGHTS: parts.placement.gathered_loss()},
    )
    made = {parts.placement.gradient_term: fresh}
    found = [_with_gradients(parts, moment.terms) for moment in head.profile.moments]
    if head.backward is not None:
        found.insert(0, merged(head.profile.saved, head.backward))
    return [
        *(_column(Instant.LOSS_BACKWARD, common, made, terms) for terms in found),
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
    return _renamed(terms, Term.UNSHARDED_GRADIENTS, parts.placement.gradient_term)


def _kept_as(parts: Parts, terms: Terms) -> Terms:
    """Terms of the loss, a gradient among them under the term that the method keeps it in."""
    return _renamed(terms, Term.GRADIENTS, parts.placement.gradient_term)


def _renamed(terms: Terms, old: Term, new: Term) -> Terms:
    rest = dict(terms)
    size = rest.pop(old, None)
    return rest if size is None else merged(rest, {new: size})


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
    """The blocks' backward pass: for each kind of block its last and first, and a few more.

    Between two blocks of a kind bytes are linear in the block's number. The first block has no
    neighbour whose weights are gathered ahead, so the one behind it can need more; nor has the last
    one a neighbour that left buffers. Where gradients are collected, so can blocks during whose
    backward pass they are reduced.
    """
    kinds = [(block, parts.recomputes(index)) for index, block in enumerate(parts.blocks)]
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
    activations = _kept_of(parts)[: index + parts.recomputes(index)]
    common = merged(
        parts.static,
        placement.backward_buffers(),
        {Term.GATHERED_WEIGHTS: placement.gathered_backward(index)},
        placement.reducing(index),
        _retained(parts),
        parts.stem.saved,
        _attention_mask(parts),
        *activations,
    )
    instant = Instant.LAST_BLOCK_BACKWARD if late else Instant.FIRST_BLOCK_BACKWARD
    return [
        _column(instant, common, gradients, _with_gradients(parts, moment.terms))
        for gradients in _gradients_behind(parts, index)
        for moment in parts.blocks[index].moments
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
        _retained(parts),
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
