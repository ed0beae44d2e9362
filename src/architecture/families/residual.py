"""Blocks as two parts on a residual stream, and what can be wrapped around a part."""

from __future__ import annotations

from collections.abc import Callable

from src.architecture.builder import BlockBuilder
from src.architecture.decoder import Block
from src.architecture.families.common import rms_norm

Part = Callable[[BlockBuilder, str], str]
NormPart = Callable[[BlockBuilder, str, str], str]

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


def residual_block(
    hidden: int,
    attend: Part,
    feed: Part,
    *,
    norms: tuple[str | None, str | None] = PRE_NORMS,
    norm: NormPart = rms_norm,
) -> Block:
    """Norm, attention, add, norm, MLP, add; a norm whose name is None is left out."""
    build = BlockBuilder(width=hidden)
    stream = "x"
    for name, part in zip(norms, (attend, feed), strict=True):
        source = stream if name is None else norm(build, name, stream)
        stream = build.add(stream, part(build, source))
    return build.build(stream)


def parallel_block(
    hidden: int, attend: Part, feed: Part, *, norm: NormPart, residual_first: bool
) -> Block:
    """Attention and MLP read the same normed input; both and the stream are summed.

    Args:
        hidden: width of the stream.
        attend: attention with its output projection.
        feed: the MLP.
        norm: the one norm, `input_layernorm`.
        residual_first: whether the sum starts with the stream, or with attention and MLP.
    """
    build = BlockBuilder(width=hidden)
    normed = norm(build, "input_layernorm", "x")
    attended = attend(build, normed)
    fed = feed(build, normed)
    if residual_first:
        return build.build(build.add(build.add("x", attended), fed))
    return build.build(build.add(build.add(attended, fed), "x"))


def dropped(part: Part, probability: float) -> Part:
    """The part, then dropout."""
    return lambda build, source: build.dropout(part(build, source), probability)


def within_attention(part: Part) -> Part:
    """The part, all of it inside the attention module."""

    def write(build: BlockBuilder, source: str) -> str:
        out = part(build, source)
        build.end_attention()
        return out

    return write


def scaled(part: Part) -> Part:
    """The part, then a multiplication by a constant: a tensor of its own."""
    return lambda build, source: build.copy(part(build, source), name="scaled")


def normed(part: Part, norm: NormPart, name: str) -> Part:
    """The part, then a norm."""
    return lambda build, source: norm(build, name, part(build, source))
