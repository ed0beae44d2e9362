"""What a transformers model does in a forward pass, as a list of events.

An event is one call of an embedding, Linear, norm, activation, dropout, router, stack of experts or
attention, with the storages that it reads and writes. Storages tell what an operation reads even
where its input was split or reshaped on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.GELU, nn.Tanh)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call.

    Attributes:
        kind: what was called.
        name: of the module, where it has one.
        widths: last dimensions of input and output, or what else tells the call apart.
        reads: storages of the inputs.
        writes: storage of the output.
    """

    kind: str
    name: str = ""
    widths: tuple[object, ...] = ()
    reads: tuple[int, ...] = ()
    writes: int = 0
    module: nn.Module | None = None


@dataclass(kw_only=True)
class Recorder:
    """Collects events; keeps every tensor alive so that no storage is used twice."""

    model: PreTrainedModel
    events: list[Event] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)
    inside: int = 0

    def storage(self, tensor: torch.Tensor) -> int:
        self.alive.append(tensor)
        return tensor.untyped_storage().data_ptr()

    def add(
        self,
        kind: str,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        *,
        name: str = "",
        widths: tuple[object, ...] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        if self.inside:
            return
        self.events.append(
            Event(
                kind=kind,
                name=name,
                widths=(inputs[0].shape[-1], output.shape[-1]) if widths is None else widths,
                reads=tuple(self.storage(tensor) for tensor in inputs),
                writes=self.storage(output),
                module=module,
            )
        )

    def watch(self, name: str, module: nn.Module, kind: str, *, closed: bool) -> None:
        """Record a module's calls; of a closed one, nothing inside."""

        def before(_module: nn.Module, _arguments: object, _options: object) -> None:
            self.inside += closed

        def after(
            called: nn.Module,
            arguments: tuple[torch.Tensor, ...],
            options: dict[str, torch.Tensor],
            output: torch.Tensor | tuple[torch.Tensor, ...],
        ) -> None:
            self.inside -= closed
            source = arguments[0] if arguments else next(iter(options.values()))
            first = output[0] if isinstance(output, tuple) else output
            self.add(kind, (source,), first, name=name, module=called)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)


def kind_of(module: nn.Module) -> str | None:
    """What a module counts as, or None where it is only a container."""
    class_name = type(module).__name__
    if isinstance(module, nn.Linear | Conv1D):
        return "linear"
    if class_name.endswith("Router"):
        return "router"
    if class_name.endswith("Experts"):
        return "experts"
    if class_name.endswith("Norm"):
        return "norm"
    activation = type(module).__module__ == "transformers.activations"
    if activation or isinstance(module, ACTIVATIONS) or class_name == "BloomGelu":
        return "activation"
    return None


@contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """Functions that are called without a module of their own."""
    names = {id(value): name for name, value in recorder.model.named_parameters()}
    functional = torch.nn.functional

    def embedding(indices: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        out = real_embedding(indices, weight, *rest)
        name = names[id(weight)].removesuffix(".weight")
        recorder.add("embed", (weight,), out, name=name, widths=tuple(weight.shape))
        return out

    def dropout(
        source: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        out = real_dropout(source, p, training, inplace)
        if p and training:
            scores = source.dim() == 4
            kind = "score-dropout" if scores else "dropout"
            recorder.add(kind, (source,), out, widths=(p,) if scores else (p, source.shape[-1]))
        return out

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object
    ) -> torch.Tensor:
        recorder.inside += 1
        out = real_attention(query, key, value, **options)
        recorder.inside -= 1
        shapes = tuple((one.shape[1], one.shape[3]) for one in (query, key, value))
        masked = options.get("attn_mask") is not None
        widths = (*shapes, options.get("dropout_p", 0.0), masked)
        recorder.add("attention", (query, key, value), out, widths=widths)
        return out

    def softmax(source: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        out = real_softmax(source, *rest, **options)
        if source.dim() == 4:
            recorder.add("softmax", (source,), out, widths=(source.shape[1], out.dtype))
        return out

    real_embedding, real_dropout = functional.embedding, functional.dropout
    real_attention, real_softmax = functional.scaled_dot_product_attention, functional.softmax
    replaced: dict[str, Callable[..., torch.Tensor]] = {
        "embedding": embedding,
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        "softmax": softmax,
    }
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(functional, name, function))
        yield


def forward_events(model: PreTrainedModel, *, sequence: int) -> list[Event]:
    """Events of one training forward pass with two sequences."""
    recorder = Recorder(model=model)
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None:
            closed = kind in ("router", "experts", "activation", "norm")
            recorder.watch(name, module, kind, closed=closed)
    tokens = torch.randint(3, 90, (2, sequence))
    with patched(recorder):
        model(input_ids=tokens)
    return recorder.events
