"""The ledger as a function of the shape: instants x terms, every cell a `Size`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from src.architecture import Decoder, describe
from src.memory.counts import ModelCounts, count_model
from src.memory.kernels import Kernel
from src.memory.placement import Placement, place
from src.memory.profile import Profile, profile
from src.memory.regime import Regime, regime_of
from src.memory.size import Size, fixed, per_score, per_token, total
from src.memory.tape import Terms
from src.memory.terms import Instant, Term
from src.spec import Checkpointing, Gpu, Job, Layout, Method

FLOAT_BYTES = 4
INPUT_BYTES_PER_TOKEN = 3 * 8
"""Token ids, labels and attention mask, int64, as the Trainer puts them on the GPU."""

WORKSPACE_BYTES = 8_519_680
WORKSPACE_BYTES_HOPPER = 32 * 1024**2
"""cuBLAS workspace per handle and stream (ATen/cuda/CublasHandlePool.cpp)."""


class Column(NamedTuple):
    """One candidate for an instant's column."""

    instant: Instant
    terms: Terms
    size: Size


def merged(*parts: Terms) -> Terms:
    """Terms added up."""
    terms: Terms = {}
    for part in parts:
        for term, size in part.items():
            terms[term] = terms[term].plus(size) if term in terms else size
    return terms


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Everything that columns are put together from."""

    decoder: Decoder
    regime: Regime
    placement: Placement
    counts: ModelCounts
    stem: Profile
    blocks: tuple[Profile, ...]
    masked: bool
    head: Profile
    static: Terms

    @property
    def checkpointed(self) -> bool:
        """Whether blocks are recomputed."""
        return self.regime.checkpointing is Checkpointing.FULL

    @property
    def tied_head(self) -> float:
        """Elements of the head's gradient that no parameter of the head accounts for."""
        lm_head = self.decoder.lm_head
        trained = self.regime.trains_weights and lm_head.tied
        return lm_head.width * lm_head.in_features if trained else 0


@lru_cache(maxsize=4096)
def columns(job: Job, method: Method, layout: Layout, gpu: Gpu) -> tuple[Column, ...]:
    """Every column that is an instant's largest at some shape, in the order of instants.

    Sizes are functions of the sequence length; `job.seq_len` only decides whether it passes a
    sliding window, where attention is given a mask.

    Raises:
        UserError: the config or the attention implementation is impossible.
    """
    parts = _parts(describe(job.model), job, method, layout, gpu)
    found = [
        *_load(parts),
        *_forward_end(parts),
        *_loss_backward(parts),
        *_block_backward(parts, first=False),
        *_block_backward(parts, first=True),
        *_gradient_sync(parts),
        *_optimizer_step(parts),
    ]
    kept: list[Column] = []
    for instant in Instant:
        mine = [column for column in found if column.instant is instant]
        mine.sort(key=lambda column: column.size, reverse=True)
        undominated: list[Column] = []
        for column in mine:
            if not any(other.size.at_least(column.size) for other in undominated):
                undominated.append(column)
        kept += undominated
    return tuple(kept)


def _parts(decoder: Decoder, job: Job, method: Method, layout: Layout, gpu: Gpu) -> _Parts:
    regime = regime_of(decoder, job, method, layout, gpu)
    counts = count_model(
        decoder,
        finetune=job.finetune,
        tp=layout.tp,
        shard=layout.shard,
        threshold=job.zero.param_persistence_threshold,
    )
    placement = place(job, method, layout, regime, counts)
    stem = profile(
        (decoder.stem,),
        regime,
        width=0,
        source_bytes=regime.parameter_bytes,
        source_counted=False,
    )
    masked = regime_of(decoder, job, method, layout, gpu, masked=True)
    regimes = tuple(
        masked if window is not None and job.seq_len >= window else regime
        for window in decoder.windows or (None,) * decoder.num_layers
    )
    blocks, stream = _block_profiles(decoder, regimes, stem.out_bytes)
    head = profile(
        (decoder.tail, decoder.head),
        replace(regime, tp=1),
        width=decoder.hidden_size,
        source_bytes=stream,
        source_counted=True,
        out_bytes=_loss_bytes(decoder, regime),
    )
    workspace = WORKSPACE_BYTES_HOPPER if gpu.compute_capability >= (9, 0) else WORKSPACE_BYTES
    static = merged(
        placement.static(),
        {
            Term.WEIGHTS: fixed(decoder.buffer_bytes),
            Term.INPUTS: per_token(INPUT_BYTES_PER_TOKEN),
            Term.WORKSPACES: fixed(2 * workspace),
        },
    )
    return _Parts(
        decoder=decoder,
        regime=regime,
        placement=placement,
        counts=counts,
        stem=stem,
        blocks=blocks,
        masked=masked in regimes,
        head=head,
        static=static,
    )


def _block_profiles(
    decoder: Decoder, regimes: tuple[Regime, ...], source_bytes: int
) -> tuple[tuple[Profile, ...], int]:
    """Profiles of all blocks, and bytes per element of the last one's output."""
    profiles: list[Profile] = []
    stream = source_bytes
    for block, regime in zip(decoder.blocks, regimes, strict=True):
        found = profile(
            (block,),
            regime,
            width=decoder.hidden_size,
            source_bytes=stream,
            source_counted=regime.checkpointing is not Checkpointing.FULL,
        )
        profiles.append(found)
        stream = found.out_bytes
    return tuple(profiles), stream


def _loss_bytes(decoder: Decoder, regime: Regime) -> int:
    """Bytes per element of the loss: fp32 where the family or autocast upcasts."""
    upcast = decoder.loss_upcast or regime.autocast
    return FLOAT_BYTES if upcast else regime.compute_bytes


def _column(instant: Instant, *terms: Terms) -> Column:
    joined = merged(*terms)
    return Column(instant, joined, total(joined.values()))


def _load(parts: _Parts) -> list[Column]:
    tables = {Term.WEIGHTS: fixed(parts.decoder.buffer_bytes)}
    return [_column(Instant.LOAD, parts.placement.load(), tables)]


def _kept_activations(parts: _Parts) -> Terms:
    """Kept at the end of the forward pass, without the head's."""
    kept = [
        {Term.CHECKPOINTS: block.source} if parts.checkpointed else block.saved
        for block in parts.blocks
    ]
    return merged(parts.stem.saved, *kept, _attention_mask(parts))


def _attention_mask(parts: _Parts) -> Terms:
    """Eager attention gets an additive S x S mask, SDPA a boolean one where it gets any."""
    if parts.regime.kernel is Kernel.EAGER:
        return {Term.ATTENTION_MASK: per_score(parts.stem.out_bytes)}
    if parts.masked or parts.decoder.attention.explicit_mask:
        return {Term.ATTENTION_MASK: per_score(1)}
    return {}


def _waiting_gradients(parts: _Parts) -> Terms:
    """Gradients of earlier micro steps."""
    placement = parts.placement
    if not placement.keeps_gradients_between_steps:
        return {}
    return placement.waiting_gradients()


def _forward_end(parts: _Parts) -> list[Column]:
    """Inside the loss, and after accelerate has turned the model's outputs to fp32.

    Inside, the model's code still holds what the final norm gave, also where nothing saves it.
    """
    vocab, regime = parts.decoder.vocab_size, parts.regime
    logits = per_token(vocab * regime.compute_bytes)
    loss_bytes = _loss_bytes(parts.decoder, regime)
    common = merged(
        parts.static,
        _waiting_gradients(parts),
        _kept_activations(parts),
        parts.head.saved,
        {Term.LOGITS: logits, Term.GATHERED_WEIGHTS: parts.placement.gathered_forward()},
    )
    upcast = per_token(vocab * loss_bytes if loss_bytes != regime.compute_bytes else 0)
    log_probabilities = per_token(vocab * loss_bytes)
    cached = _autocast_cache(parts)
    found = [
        _column(
            Instant.FORWARD_END,
            common,
            cached,
            {
                Term.SAVED_ACTIVATIONS: parts.head.held,
                Term.LOSS_TEMPORARIES: upcast.plus(log_probabilities),
            },
        )
    ]
    if regime.autocast:
        outputs = {
            Term.LOGITS: per_token(vocab * FLOAT_BYTES),
            Term.LOSS_TEMPORARIES: log_probabilities,
        }
        found.append(_column(Instant.FORWARD_END, common, outputs))
    return found


def _autocast_cache(parts: _Parts) -> Terms:
    """Cast copies of trained weights stay cached until autocast is left, recomputed or not."""
    if not (parts.checkpointed and parts.regime.casts_weights and parts.regime.trains_weights):
        return {}
    casts = [block.saved[Term.CAST_WEIGHTS] for block in parts.blocks]
    return {Term.CAST_WEIGHTS: total(casts)}


def _backward_common(parts: _Parts) -> Terms:
    gathered = parts.placement.gathered_backward()
    return merged(
        parts.static,
        parts.placement.backward_buffers(),
        {Term.GATHERED_WEIGHTS: gathered},
    )


def _loss_backward(parts: _Parts) -> list[Column]:
    """The loss's backward (log-probabilities and two gradients), then the head's and the norm's."""
    bytes_ = parts.decoder.vocab_size * _loss_bytes(parts.decoder, parts.regime)
    common = merged(
        parts.static,
        parts.placement.backward_buffers(),
        _waiting_gradients(parts),
        _kept_activations(parts),
        {Term.GATHERED_WEIGHTS: parts.placement.gathered_forward()},
    )
    loss = merged(parts.head.saved, {Term.LOSS_TEMPORARIES: per_token(3 * bytes_)})
    moments = [_with_gradients(parts, moment.terms) for moment in parts.head.moments]
    return [_column(Instant.LOSS_BACKWARD, common, terms) for terms in (loss, *moments)]


def _with_gradients(parts: _Parts, terms: Terms) -> Terms:
    """A moment's terms, its fresh gradients under the term that the method keeps them in."""
    renamed = dict(terms)
    fresh = renamed.pop(Term.UNSHARDED_GRADIENTS, None)
    if fresh is None:
        return renamed
    return merged(renamed, {parts.placement.gradient_term: fresh})


def _edge_gradients(parts: _Parts) -> Terms:
    """Gradients of the head and the final norm, which stay while blocks run backward."""
    if not parts.regime.trains_weights:
        return {}
    norm_and_head = parts.decoder.tail.num_parameters + parts.decoder.head.num_parameters
    return parts.placement.edge_gradients(norm_and_head + parts.tied_head)


def _block_backward(parts: _Parts, *, first: bool) -> list[Column]:
    """One end of the blocks' backward pass: every moment of that block."""
    placement, counts = parts.placement, parts.counts
    instant = Instant.FIRST_BLOCK_BACKWARD if first else Instant.LAST_BLOCK_BACKWARD
    block = parts.blocks[0 if first else -1]
    others = parts.blocks[:0] if first else parts.blocks[:-1]
    activations: list[Terms] = [parts.stem.saved, _attention_mask(parts)]
    if parts.checkpointed:
        activations += [{Term.CHECKPOINTS: other.source} for other in (*others, block)]
    else:
        activations += [other.saved for other in others]
    if placement.keeps_gradients_between_steps:
        gradients = _waiting_gradients(parts)
    else:
        done = placement.kept_gradients(counts.all) - placement.kept_gradients(counts.edges)
        done -= placement.kept_gradients(counts.first)
        gradients = merged(
            _edge_gradients(parts),
            {Term.GRADIENTS: fixed(done)} if first else {},
        )
    common = merged(
        _backward_common(parts),
        placement.block_buffers(first=first),
        gradients,
        *activations,
    )
    return [
        _column(instant, common, _with_gradients(parts, moment.terms)) for moment in block.moments
    ]


def _gradient_sync(parts: _Parts) -> list[Column]:
    """The embeddings' gradients arrive, behind the first block's; what is last is reduced."""
    placement, counts = parts.placement, parts.counts
    blocks = placement.kept_gradients(counts.all) - placement.kept_gradients(counts.edges)
    fixed_terms = merged(parts.static, placement.backward_buffers())
    if placement.keeps_gradients_between_steps:
        before = _waiting_gradients(parts)
    else:
        before = merged(_edge_gradients(parts), {Term.GRADIENTS: fixed(blocks)})
    gathered = {Term.GATHERED_WEIGHTS: placement.gathered_forward()}
    found = [
        _column(
            Instant.FIRST_BLOCK_BACKWARD,
            fixed_terms,
            gathered,
            before,
            _with_gradients(parts, item.terms),
        )
        for item in parts.stem.moments
    ]
    for extra in placement.sync():
        edges = 0.0 if Term.UNSHARDED_GRADIENTS in extra else placement.kept_gradients(counts.edges)
        kept = {Term.GRADIENTS: fixed(blocks + edges)}
        found.append(_column(Instant.GRADIENT_SYNC, fixed_terms, kept, extra))
    return found


def _optimizer_step(parts: _Parts) -> list[Column]:
    placement = parts.placement
    gradients = {Term.GRADIENTS: fixed(placement.gradients_at_step())}
    return [_column(Instant.OPTIMIZER_STEP, parts.static, gradients, placement.step())]
