"""One description of a causal language model, whatever family it is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from src.architecture.ops import Attention, Embed, Experts, Linear, Op, Parameter
from src.spec import Attention as AttentionChoice


class Positions(StrEnum):
    """How positions enter; LEARNED is a table with an end, the others only a training range."""

    LEARNED = "learned"
    ROTARY = "rotary"
    ALIBI = "alibi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of operations.

    Attributes:
        source: name of the value that comes in; unused where the first operations are embeddings.
        out: name of the value that goes out.
        ops: in order of execution.
        attention: number of the first operation of the attention module, and of the first one
            behind it; both 0 where there is none.
    """

    source: str
    out: str
    ops: tuple[Op, ...]
    attention: tuple[int, int] = (0, 0)

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter tensor of the block."""
        for op in self.ops:
            yield from op.parameters()

    @property
    def num_parameters(self) -> int:
        """Parameters of the block, in elements."""
        return sum(parameter.numel for parameter in self.parameters())


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A causal language model: stem, blocks, final norm, head.

    Attributes:
        model_type: of transformers.
        hidden_size: width of the residual stream.
        vocab_size: rows of the token embedding and width of the logits.
        stem: embeddings and what follows them before the first block.
        blocks: the blocks in order; equal ones are the same object.
        blocks_path: where transformers keeps them (`model.layers`).
        tail: from the last block to the head (the final norm).
        head: the Linear that makes the logits, and what scales or caps them.
        positions: how positions enter.
        max_positions: longest sequence of the table, or that the model was trained for; None: no
            limit.
        implementations: the attention implementations that transformers has for the family.
        loss_upcast: whether the family's loss makes the logits fp32.
        windows: the sliding window of each block's attention, in tokens, or None; empty where no
            block has one. SDPA is given a mask wherever the sequence is at least as long.
        buffer_bytes: of the tables kept beside the parameters (causal masks, sinusoids), all blocks
            together, as they are created; tables below 16 KiB in all are left out.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    stem: Block
    blocks: tuple[Block, ...]
    blocks_path: str
    tail: Block
    head: Block
    positions: Positions
    max_positions: int | None
    implementations: frozenset[AttentionChoice]
    loss_upcast: bool = True
    windows: tuple[int | None, ...] = ()
    buffer_bytes: int = 0

    @cached_property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @cached_property
    def attention(self) -> Attention:
        """The attention of the first block; tensor parallel degrees have to divide its heads."""
        return next(op for op in self.blocks[0].ops if isinstance(op, Attention))

    @cached_property
    def lm_head(self) -> Linear:
        """The Linear that makes the logits."""
        return next(
            op for op in self.head.ops if isinstance(op, Linear) and op.width == self.vocab_size
        )

    @cached_property
    def has_experts(self) -> bool:
        """Whether any block routes tokens to experts."""
        return any(isinstance(op, Experts) for block in self.blocks for op in block.ops)

    @cached_property
    def fp32_parameters(self) -> tuple[str, ...]:
        """Parameters that stay fp32 in a half-precision model, named within their block."""
        kept = (
            parameter.name
            for block in self.blocks
            for op in block.ops
            if isinstance(op, Linear) and op.stays_fp32
            for parameter in op.parameters()
        )
        return tuple(dict.fromkeys(kept))

    @cached_property
    def token_embedding(self) -> Embed:
        """The token embedding."""
        return next(op for op in self.stem.ops if isinstance(op, Embed))

    def named_parameters(self) -> Iterator[Parameter]:
        """Every parameter once, under transformers' full name."""
        yield from self.stem.parameters()
        for index, block in enumerate(self.blocks):
            for parameter in block.parameters():
                name = f"{self.blocks_path}.{index}.{parameter.name}"
                yield Parameter(name=name, shape=parameter.shape)
        yield from self.tail.parameters()
        yield from self.head.parameters()

    @cached_property
    def num_parameters(self) -> int:
        """All parameters in elements, tied ones once."""
        edges = self.stem.num_parameters + self.tail.num_parameters + self.head.num_parameters
        return edges + sum(block.num_parameters for block in self.blocks)
