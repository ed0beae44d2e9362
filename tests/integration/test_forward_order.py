"""The operations of a description, against what transformers' model does when it runs.

Both are lists: embeddings, Linears, norms, activations, dropouts, routers, experts, attentions, in
order of execution, each with its name and widths. Where a description says that an operation reads
another one's output, or a view of it, the storages have to be the same; where it says that there is
a copy, a sum or a product in between, they have to differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from transformers.activations import ACT2FN

from src.architecture import Decoder, describe
from src.architecture.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Dropout,
    Embed,
    Experts,
    Linear,
    Norm,
    Op,
    View,
)
from src.spec import Attention as AttentionChoice
from src.spec import Model
from tests.forward_events import Event, forward_events
from tests.small_configs import SMALL_CONFIGS
from tests.transformers_models import build

SHORT = 6
LONG = 12
SDPA = [
    name
    for name, config in SMALL_CONFIGS.items()
    if config["model_type"] not in ("bloom", "gpt_neo", "gemma2", "gpt_oss")
]


def described(name: str) -> Decoder:
    return describe(Model(name=name, hf_id=None, config=SMALL_CONFIGS[name]))


@dataclass(kw_only=True)
class Expected:
    """The events that a description predicts, and which of them each value comes from.

    Attributes:
        made_by: index of the event whose output a value is or shares; None: of none.
        unknown: values whose storage the description says nothing about.
    """

    eager: bool
    events: list[Event] = field(default_factory=list)
    reads: list[tuple[int | None, ...]] = field(default_factory=list)
    made_by: dict[str, int | None] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def run(self, ops: tuple[Op, ...], prefix: str = "") -> None:
        for op in ops:
            for event in self.event(op, prefix):
                self.events.append(event)
                sources = (op.left, op.right) if hasattr(op, "left") else op.inputs
                self.reads.append(tuple(self.source(value) for value in sources))
                self.made_by[op.out] = len(self.events) - 1
            if isinstance(op, View):
                self.made_by[op.out] = self.made_by.get(op.source)
            elif isinstance(op, Add) and op.in_place:
                self.made_by[op.out] = self.made_by.get(op.left)
            elif isinstance(op, Copy) and op.like is not None:
                self.unknown.add(op.out)

    def source(self, value: str) -> int | None:
        if value in self.unknown:
            return -1
        return self.made_by.get(value)

    def event(self, op: Op, prefix: str) -> Iterator[Event]:
        if isinstance(op, Embed):
            yield Event(kind="embed", name=prefix + op.name, widths=(op.rows, op.width))
        elif isinstance(op, Linear):
            kind = "linear" if op.is_module else "router"
            yield Event(kind=kind, name=prefix + op.name, widths=(op.in_features, op.width))
        elif isinstance(op, Norm):
            for name in op.module_names:
                yield Event(kind="norm", name=prefix + name, widths=(op.features, op.features))
        elif isinstance(op, Activation) and op.function != "tanh":
            yield Event(kind="activation", name=op.function, widths=(op.width, op.width))
        elif isinstance(op, Dropout):
            yield Event(kind="dropout", widths=(op.probability, op.width))
        elif isinstance(op, Experts):
            yield Event(kind="experts", name=prefix + op.name, widths=(op.width, op.width))
        elif isinstance(op, Attention):
            yield from self.attention(op)

    def attention(self, op: Attention) -> Iterator[Event]:
        if not self.eager:
            key, value = (op.num_kv_heads, op.head_dim), (op.num_kv_heads, op.value_head_dim)
            widths = ((op.num_heads, op.head_dim), key, value, op.dropout, op.explicit_mask)
            yield Event(kind="attention", widths=widths)
            return
        dtype = torch.float32 if op.softmax_fp32 else torch.bfloat16
        yield Event(kind="softmax", widths=(op.num_heads, dtype))
        if op.dropout:
            yield Event(kind="score-dropout", widths=(op.dropout,))


def expected(decoder: Decoder, *, eager: bool) -> Expected:
    """Values of one block are not those of the next: the stream between them is always a sum."""
    out = Expected(eager=eager)
    out.run(decoder.stem.ops)
    stream = out.made_by.get(decoder.stem.out)
    for index, block in enumerate(decoder.blocks):
        out.made_by, out.unknown = {block.source: stream}, set()
        out.run(block.ops, f"{decoder.blocks_path}.{index}.")
        stream = out.made_by.get(block.out)
    for part in (decoder.tail, decoder.head):
        out.made_by, out.unknown = {part.source: stream}, set()
        out.run(part.ops)
        stream = out.made_by.get(part.out)
    return out


def name_of(event: Event) -> str:
    """Activations by what they compute, everything else by its name."""
    if event.kind != "activation" or event.module is None:
        return event.name
    if type(event.module).__name__ == "BloomGelu":
        return "gelu_pytorch_tanh"
    return next(name for name in ACT2FN if type(ACT2FN[name]) is type(event.module))


def comparable(events: list[Event]) -> list[tuple[object, ...]]:
    """Kind, name and widths; activations of one class have several names."""
    return [
        (
            event.kind,
            _class_of(name_of(event)) if event.kind == "activation" else name_of(event),
            event.widths,
        )
        for event in events
    ]


def _class_of(function: str) -> str:
    return type(ACT2FN[function]).__name__


@pytest.mark.parametrize("name", SDPA)
def test_order_widths_and_dataflow(name: str) -> None:
    torch.manual_seed(0)
    predicted = expected(described(name), eager=False)
    model = build(SMALL_CONFIGS[name], device="cpu", attn_implementation="sdpa")
    actual = forward_events(model, sequence=SHORT)
    assert comparable(predicted.events) == comparable(actual)
    made: dict[int, int] = {}
    for index, (sources, event) in enumerate(zip(predicted.reads, actual, strict=True)):
        if event.kind not in ("embed", "router", "experts"):
            read = tuple(made.get(storage) for storage in event.reads)
            for said, found in zip(sources, read, strict=True):
                assert said in (-1, found) or _is_attention(actual, said), (index, event, said)
        made[event.writes] = index


def _is_attention(events: list[Event], index: int | None) -> bool:
    """Attention's output may be copied to bring heads together; its storage says nothing."""
    return index is not None and events[index].kind == "attention"


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_eager_order_and_softmax_dtype(name: str) -> None:
    torch.manual_seed(0)
    predicted = expected(described(name), eager=True)
    model = build(
        SMALL_CONFIGS[name], device="cpu", attn_implementation="eager", dtype=torch.bfloat16
    )
    actual = forward_events(model, sequence=SHORT)
    assert comparable(predicted.events) == comparable(actual)


@pytest.mark.parametrize("name", SDPA)
def test_windows_give_sdpa_a_mask(name: str) -> None:
    decoder = described(name)
    model = build(SMALL_CONFIGS[name], device="cpu", attn_implementation="sdpa")
    events = [item for item in forward_events(model, sequence=LONG) if item.kind == "attention"]
    windows = decoder.windows or (None,) * decoder.num_layers
    always = decoder.attention.explicit_mask
    assert len(events) == len(windows)
    for event, window in zip(events, windows, strict=True):
        assert event.widths[-1] == (always or window is not None)


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_families_without_sdpa_are_left_out_for_that_reason(name: str) -> None:
    assert (AttentionChoice.SDPA in described(name).implementations) == (name in SDPA)
