"""Follow every storage of a fake-tensor run: birth, resize and free, and whose bytes it holds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from src.measure.events import Instant, Owner

aten = torch.ops.aten

ENGINE_ADD_REFERENCES = 4
"""`Tensor._use_count()` of an operand of the autograd engine's accumulation that nobody else holds:
the engine's buffer, the dispatcher's stack and two of Python's."""


@dataclass(slots=True, eq=False)
class Block:
    """One storage's bytes from allocation to free.

    Attributes:
        number: order of birth.
        num_bytes: bytes asked for.
        stream: the stream it belongs to.
        owner: whose bytes; `temporaries` until something better is known.
        in_forward: born in a forward pass, or in the recomputation of one.
        forward_region: which uninterrupted stretch of forward operations bore it.
        outlived: whether it outlived that stretch.
        layer: the transformer block in whose stretch of the step it was born, or whose parameter it
            belongs to; `NO_LAYER` outside the blocks, None where that is not known yet.
        home: the transformer block whose parameter it is the gradient of; None for anything else.
        used_by: other streams that use it, as `record_stream` tells the caching allocator.
    """

    number: int
    num_bytes: int
    stream: int
    owner: Owner
    in_forward: bool
    forward_region: int
    outlived: bool = False
    layer: int | None = None
    home: int | None = None
    used_by: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Entry:
    """One line of the trace: `num_bytes` of `block` come alive (or, negative, are freed)."""

    block: Block
    num_bytes: int
    instant: Instant
    step: int
    layer: int | None = None


NO_LAYER = -1
"""Label of what belongs to no transformer block."""

WRAPPERS = frozenset({"DTensor", "AsyncCollectiveTensor"})
"""Tensor subclasses around local tensors: their own dispatch runs the local operators."""

WorkspaceRule = Callable[[Any, tuple[Any, ...], Any, bool], tuple[int, int]]
"""(operator, arguments, result, in backward) -> bytes while it runs, bytes that stay."""


class Trace:
    """The record. `Recorder` writes it; whoever runs the step says where in the step it is.

    Attributes:
        entries: what happened, in order.
        instant: the current window.
        step: optimizer step, 0 while loading.
        vocab_sizes: last dimensions that make a large tensor `logits`.
        num_tokens: tokens of a micro batch.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.instant = Instant.LOAD
        self.step = 0
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        self.backward = False
        self.vocab_sizes: frozenset[int] = frozenset()
        self.num_tokens = 0
        self.default_owner = Owner.TEMPORARIES
        self.follows = True
        self.layer = NO_LAYER
        self._region = 0
        self._in_region = False
        self._live: dict[int, tuple[Block, Any]] = {}
        self._tensors: dict[int, list[Any]] = {}
        self._region_blocks: list[Block] = []
        self._count = 0

    @property
    def stream(self) -> int:
        """Number of the current stream, by first use; 0 is the compute stream."""
        return self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within it, new tensors are the host's, which nothing is recorded of."""
        self.follows = False
        try:
            yield
        finally:
            self.follows = True

    def note_operation(self, *, forward: bool) -> None:
        """Close or open a stretch of forward operations before an operator runs."""
        if forward and not self._in_region:
            self._region += 1
        elif not forward and self._in_region:
            live = {id(block) for block, _ in self._live.values()}
            for block in self._region_blocks:
                block.outlived = id(block) in live
            self._region_blocks.clear()
        self._in_region = forward

    @property
    def is_timed(self) -> bool:
        """Whether what happens now belongs to the transformer block that is running."""
        return self.backward or self.instant is Instant.FORWARD_END

    def born(
        self, num_bytes: int, owner: Owner | None = None, *, layer: int | None = None
    ) -> Block:
        """A block of bytes that no tensor shows, or a storage's."""
        self._count += 1
        layer = self.layer if self.is_timed else layer
        block = Block(
            number=self._count,
            num_bytes=num_bytes,
            stream=self.stream,
            owner=owner or self.default_owner,
            in_forward=self._in_region,
            forward_region=self._region,
            layer=layer,
        )
        if self._in_region:
            self._region_blocks.append(block)
        self.entries.append(Entry(block, num_bytes, self.instant, self.step, layer))
        return block

    def freed(self, block: Block) -> None:
        """The block's bytes are free."""
        if block.num_bytes:
            layer = self.layer if self.is_timed else block.layer
            self.entries.append(Entry(block, -block.num_bytes, self.instant, self.step, layer))
            block.num_bytes = 0

    def follow(
        self, tensor: torch.Tensor, owner: Owner | None = None, *, layer: int | None = None
    ) -> None:
        """Record the storage of `tensor` if it is new; remember that `tensor` views it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is None:
            num_bytes = storage.nbytes()
            block = self.born(num_bytes, owner, layer=layer) if num_bytes else self.empty_block()

            def on_death(_: object) -> None:
                del self._live[key]
                self._tensors.pop(key, None)
                self.freed(block)

            self._live[key] = (block, weakref.ref(storage, on_death))
            self._tensors[key] = []
        views = self._tensors[key]
        if not any(view() is tensor for view in views):
            views.append(weakref.ref(tensor))

    def empty_block(self) -> Block:
        """The block of a storage without bytes; it may be resized later."""
        self._count += 1
        return Block(self._count, 0, self.stream, self.default_owner, False, 0)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """`storage` has been resized to `num_bytes`: one free and one allocation."""
        known = self._live.get(storage._cdata)
        if known is None or known[0].num_bytes == num_bytes:
            return
        block = known[0]
        self.freed(block)
        block.num_bytes = num_bytes
        if num_bytes:
            block.stream = self.stream
            block.layer = self.layer if self.is_timed else block.layer
            entry = Entry(block, num_bytes, self.instant, self.step, block.layer)
            self.entries.append(entry)

    def own(self, tensors: Iterable[torch.Tensor], owner: Owner) -> None:
        """Say whose bytes the storages of `tensors` are."""
        for tensor in tensors:
            known = self._live.get(tensor.untyped_storage()._cdata)
            if known is not None:
                known[0].owner = owner

    def note_use(self, tensor: torch.Tensor, stream: object) -> None:
        """`stream` uses the storage of `tensor`, which may belong to another (`record_stream`)."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        number = self._streams.setdefault(id(stream), len(self._streams))
        if known is not None and number != known[0].stream:
            known[0].used_by.add(number)

    def settle(self, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        """`gradient` is the parameter's: say so, and whose block it belongs to from now on."""
        known = self._live.get(gradient.untyped_storage()._cdata)
        if known is not None:
            known[0].owner = Owner.GRADIENTS
            known[0].home = self.layer_of(parameter)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take back the storages of `tensors`: a CUDA run keeps them on the host."""
        for tensor in tensors:
            known = self._live.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.freed(known[0])

    def owner_of(self, tensor: torch.Tensor) -> Owner | None:
        """Whose bytes the storage of `tensor` holds; None if it is not followed."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0].owner

    def layer_of(self, value: object) -> int | None:
        """The transformer block that the storage of a tensor belongs to; None if not known."""
        if not isinstance(value, torch.Tensor):
            return None
        known = self._live.get(value.untyped_storage()._cdata)
        if known is None:
            return None
        return known[0].layer if known[0].home is None else known[0].home

    def is_sole_view(self, tensor: torch.Tensor) -> bool:
        """Whether no other live tensor shares the storage of `tensor`."""
        views = self._tensors.get(tensor.untyped_storage()._cdata, [])
        return all(view() is None or view() is tensor for view in views)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has a place of its own and they leave no gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _called_by_engine() -> bool:
    """Whether the nearest Python caller of the operator is the call that started the engine."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("__torch_dispatch__", "_fn", "inner"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _is_engine_accumulation(func: Any, args: tuple[Any, ...], trace: Trace) -> bool:
    """Whether the autograd engine adds two gradients and would do it in place on CUDA.

    `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: a plain dense tensor that the
    engine's buffer alone holds. The engine excludes tensor subclasses, which fake tensors are.
    """
    if func is not aten.add.Tensor or not trace.backward or torch.is_grad_enabled():
        return False
    if not _called_by_engine():
        return False
    mine, other = args[0], args[1]
    return (
        isinstance(other, torch.Tensor)
        and mine.shape == other.shape
        and mine.dtype == other.dtype
        and mine.dim() > 0
        and _is_dense(mine)
        and mine._use_count() <= ENGINE_ADD_REFERENCES
        and trace.is_sole_view(mine)
    )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write every operator's new storages into a trace; entered above the fake-tensor mode.

    Args:
        trace: the record.
        workspace: rule for bytes that an operator's kernel takes besides its results.
        call: runs an operator with the results that CUDA returns.
    """

    def __init__(self, trace: Trace, *, workspace: WorkspaceRule, call: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.workspace = workspace
        self.call = call
        self._adds_wrappers = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            # Masks are all ones and positions consecutive: what is asked of them holds.
            return True
        if any(kind.__name__ in WRAPPERS for kind in types):
            self._adds_wrappers |= func is aten.add.Tensor
            return NotImplemented
        trace = self.trace
        if not trace.follows:
            return func(*args, **(kwargs or {}))
        in_forward = trace.instant is Instant.FORWARD_END
        trace.note_operation(forward=in_forward or (trace.backward and torch.is_grad_enabled()))
        if not self._is_of_wrappers(func) and _is_engine_accumulation(func, args, trace):
            aten.add_.Tensor(args[0], args[1])
            return args[0]
        result = self.call(func, args, kwargs or {})
        owner = self._owner(func, args)
        leaves = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        layers = [None] * len(leaves) if trace.is_timed else self._layers(args, len(leaves))
        for leaf, layer in zip(leaves, layers, strict=True):
            trace.follow(leaf, owner or self._logits_owner(leaf), layer=layer)
        self._take_workspace(func, args, result)
        return result

    def _is_of_wrappers(self, func: Any) -> bool:
        """Whether it is the local part of adding two wrappers, never done in place."""
        found = self._adds_wrappers and func is aten.add.Tensor
        self._adds_wrappers &= not found
        return found

    def _owner(self, func: Any, args: tuple[Any, ...]) -> Owner | None:
        is_cast = func is aten._to_copy.default
        if is_cast and self.trace.owner_of(args[0]) in (Owner.WEIGHTS, Owner.GATHERED_WEIGHTS):
            return Owner.CAST_WEIGHTS
        return None

    def _layers(self, args: tuple[Any, ...], count: int) -> list[int | None]:
        """The blocks of an operator's results: those of its first operand, one by one."""
        first = args[0] if args else None
        if isinstance(first, (list, tuple)):
            found = [self.trace.layer_of(value) for value in first]
            return found if len(found) == count else [None] * count
        return [self.trace.layer_of(first)] * count

    def _logits_owner(self, tensor: torch.Tensor) -> Owner | None:
        trace = self.trace
        if not trace.step or tensor.dim() < 2 or tensor.shape[-1] not in trace.vocab_sizes:
            return None
        rows = tensor.numel() // tensor.shape[-1]
        return Owner.LOGITS if rows and trace.num_tokens % rows == 0 and rows > 1 else None

    def _take_workspace(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        trace = self.trace
        transient, lasting = self.workspace(func, args, result, trace.backward)
        if lasting:
            trace.born(lasting, Owner.WORKSPACE)
        if transient:
            trace.freed(trace.born(transient, Owner.WORKSPACE))
