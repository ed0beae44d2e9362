"""What a run of operations keeps and needs, worked out once per regime and cached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from src.architecture import Block
from src.memory.lowering import Lowering
from src.memory.regime import Regime
from src.memory.size import ZERO, Size
from src.memory.tape import Tape
from src.memory.terms import Term
from src.memory.values import Moment, Terms, Value
from src.memory.working import Working


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One block (or stem, or tail and head) under one regime.

    Attributes:
        source: bytes of the incoming tensor; none where no gradient flows through the block.
        out: bytes of the outgoing tensor; `out_bytes` per element.
        held: bytes of the outgoing tensor of the first block of the run, unless it is kept anyway.
        saved: what is kept for the backward pass, by term, the incoming tensor included if kept.
        retained: what lives on to the end of the whole backward pass, recomputed or not, by term.
        saves_source: whether the incoming tensor is kept.
        carries_gradient: whether a gradient flows into the outgoing tensor.
        moments: moments of the backward pass that are largest at some shape.
        parameter_gradients: gradients that the backward pass leaves, as autograd leaves them.
        recast: casts of weights that nothing keeps on the GPU, though a backward pass reads them.
        on_host: what waits in host memory.
        working: what the forward pass needs besides what it keeps; alternatives.
        crowded: moments of the forward pass with tensors that no operation's own are.
    """

    source: Size
    out: Size
    out_bytes: int
    held: Size
    saved: Terms
    retained: Terms
    saves_source: bool
    carries_gradient: bool
    moments: tuple[Moment, ...]
    parameter_gradients: Size
    recast: Size
    on_host: Size
    working: tuple[Working, ...]
    crowded: tuple[Moment, ...]


@lru_cache(maxsize=4096)
def profile(
    run: tuple[Block, ...],
    regime: Regime,
    *,
    width: int,
    source_bytes: int,
    source_counted: bool,
    source_trained: bool = True,
    out_bytes: int | None = None,
    share: float = 1.0,
    cuts: bool = False,
    gathers_at: int | None = None,
    recomputed: bool = False,
) -> Profile:
    """The profile of blocks that run one after the other.

    Args:
        run: the blocks; usually one.
        regime: dtypes and switches.
        width: elements per token of the incoming tensor; 0 for a stem.
        source_bytes: bytes per element of the incoming tensor.
        source_counted: whether the incoming tensor counts as saved here, if it is.
        source_trained: whether a gradient flows into the incoming tensor.
        out_bytes: bytes per element that the result is cast to; None: as it comes.
        share: the part of the sequence that the incoming tensor holds.
        cuts: whether the result is cut along the sequence.
        gathers_at: the block in front of which (their number: behind all) a part of the sequence is
            gathered.
        recomputed: whether only the incoming tensor is kept, and the rest computed again.
    """
    tape = Tape(runs_again=recomputed, offloads=regime.offloads and not recomputed)
    source = tape.tensor(
        width * share,
        source_bytes,
        share=share,
        counted=source_counted,
        requires_grad=source_trained,
    )
    low = Lowering(regime=regime, tape=tape, hidden_bytes=source_bytes)
    values = [source]
    for index, block in enumerate(run):
        if index == gathers_at:
            values[-1] = low.joined(values[-1])
        values.append(low.run(block, values[-1]))
    if gathers_at == len(run):
        values[-1] = low.joined(values[-1])
    first, out = values[1], values[-1]
    if cuts:
        out = low.scattered(out)
    if out_bytes is not None:
        out = low.cast(out, out_bytes)
    return profile_of(tape, source, first, out)


def profile_of(tape: Tape, source: Value, first: Value, out: Value) -> Profile:
    """What a tape says.

    Args:
        tape: the nodes.
        source: the incoming tensor; of width 0 for a stem.
        first: what the first block of the run gives.
        out: the outgoing tensor.
    """
    moments, gradients = tape.walk(out)
    return Profile(
        source=source.size if source.width and tape.needs_gradient(out) else ZERO,
        out=out.size,
        out_bytes=out.dtype_bytes,
        held=ZERO if tape.saves(first) else first.size,
        saved=tape.saved(without=out),
        retained=tape.retained(),
        saves_source=tape.saves(source),
        carries_gradient=tape.needs_gradient(out),
        moments=tuple(moments),
        parameter_gradients=gradients,
        recast=tape.recomputed().get(Term.CAST_WEIGHTS, ZERO),
        on_host=tape.on_host(),
        working=tape.working(source, out),
        crowded=tuple(tape.crowded(out)),
    )
