"""Tensors of a forward pass, and bytes by term, as the tape knows them."""

from __future__ import annotations

from dataclasses import dataclass

from src.memory.size import Size
from src.memory.terms import Term

Terms = dict[Term, Size]


def merged(*parts: Terms) -> Terms:
    """Terms added up."""
    terms: Terms = {}
    for part in parts:
        for term, size in part.items():
            terms[term] = terms[term].plus(size) if term in terms else size
    return terms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Value:
    """A tensor of the forward pass.

    Attributes:
        size: bytes of the tensor and of its gradient.
        width: elements per token on this GPU (0 for parameters).
        dtype_bytes: bytes per element.
        share: the part of the full width that this GPU holds (1 / tp inside a split region).
        storage: index of its storage; views share one.
        requires_grad: whether a gradient flows into it.
        is_parameter: whether that gradient stays.
        accumulates: whether a parameter's gradient exists already, and this one is added to it.
    """

    size: Size
    width: float
    dtype_bytes: int
    share: float
    storage: int
    requires_grad: bool = True
    is_parameter: bool = False
    accumulates: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Live bytes at one moment of a walk, by term; without what outlives the walk."""

    terms: Terms
    size: Size
