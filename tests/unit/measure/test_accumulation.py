"""Gradients are added in place exactly where the real autograd engine adds them in place.

The real side counts `add` and `add_` of a backward pass over real tensors; the trace has to decide
the same from fake ones. A view's gradient keeps its base alive, so that it is never added into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from src.measure.events import Instant
from src.measure.kernels import KernelWorkspace, run_as_cuda
from src.measure.trace import Recorder, Trace

functional = torch.nn.functional
aten = torch.ops.aten
Graph = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros(8, dtype=torch.int64)
    return functional.linear(functional.embedding(indices, weight), weight) + x.sum()


def residual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    return hidden + torch.tanh(hidden) @ weight


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    turned = torch.cat([-hidden[..., 32:], hidden[..., :32]], -1)
    return turned * weight[0] + hidden * weight[1]


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    gate = functional.linear(hidden, weight * 2)
    return functional.silu(gate) * functional.linear(hidden, weight * 3)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    hidden = x * 2
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1)
    return hidden * scale * weight[0].detach()


GRAPHS: list[Graph] = [tied, residual, halves, gated, normed]


def build(graph: Graph) -> torch.Tensor:
    x = torch.ones(2, 4, 64, requires_grad=True)
    weight = torch.ones(64, 64, requires_grad=True)
    return graph(x, weight).pow(2).sum()


def real(graph: Graph) -> tuple[int, int]:
    loss = build(graph)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        loss.backward()  # type: ignore[no-untyped-call]
    names = [event.name for event in record.events() or ()]
    return names.count("aten::add"), names.count("aten::add_")


class Counting(Recorder):  # type: ignore[no-untyped-call]
    """Counts additions that made a new tensor, and those that did not."""

    made = 0
    kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.add.Tensor and self.trace.backward:
            self.kept += result is args[0]
            self.made += result is not args[0]
        return result


def simulated(graph: Graph) -> tuple[int, int]:
    trace = Trace()
    recorder = Counting(trace, workspace=KernelWorkspace((8, 0)), call=run_as_cuda)
    with FakeTensorMode(), recorder:
        trace.step, trace.instant = 1, Instant.FORWARD_END
        loss = build(graph)
        trace.backward, trace.instant = True, Instant.LOSS_BACKWARD
        loss.backward()  # type: ignore[no-untyped-call]
    return recorder.made, recorder.kept


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_trace_adds_in_place_where_the_engine_does(graph: Graph) -> None:
    assert simulated(graph) == real(graph)


def test_the_graphs_cover_both_ways() -> None:
    assert real(tied)[0] == 1
    assert real(residual) == (0, 1)
