"""The simulated device: fake tensors on the CPU with CUDA's semantics, every storage followed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from src.measure.assumptions import num_experts
from src.measure.bitsandbytes import simulated_bitsandbytes
from src.measure.cuda_semantics import cuda_semantics
from src.measure.events import Instant, Owner
from src.measure.flash import simulated_flash_attention
from src.measure.fsdp_trace import following_fsdp
from src.measure.kernels import KernelWorkspace, run_as_cuda
from src.measure.loading import flat_parameters, loading, transient_bytes
from src.measure.methods import local_tensor
from src.measure.saved_on_host import SavedOnHost
from src.measure.trace import NO_LAYER, Recorder, Trace
from src.spec import Attention, Step

ASSUMED_STEP = 2.0
"""Value of the optimizer's step counter; no size depends on it."""


def materialise(model: nn.Module, *, device: torch.device | str = "cpu") -> Iterable[torch.Tensor]:
    """Replace every meta parameter and buffer by an empty tensor on `device`, tied ones once.

    Within a fake-tensor mode these are fake.

    Returns:
        The new tensors.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                new.__dict__.update(tensor.__dict__)
            made[id(tensor)] = (tensor, new)
        return made[id(tensor)][1]

    for module in model.modules():
        own = vars(module)
        # PEFT keeps a prompt's token numbers in a plain dictionary.
        stores: list[dict[str, Any]] = [own, *(v for v in own.values() if type(v) is dict)]
        for store in stores:
            for name, value in store.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    store[name] = real(value)
    return [new for _, new in made.values()]


@contextmanager
def _host_support() -> Iterator[None]:
    """Let foreach implementations run on fake CPU tensors, and step counters have a value."""
    # torch.optim hides its submodules from attribute access.
    adam = importlib.import_module("torch.optim.adam")
    foreach_utils = importlib.import_module("torch.utils._foreach_utils")
    devices = [*foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(
                foreach_utils, "_get_foreach_kernels_supported_devices", return_value=devices
            )
        )
        stack.enter_context(mock.patch.object(adam, "_get_value", return_value=ASSUMED_STEP))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines from PyTorch about an operator that failed: the error itself is reported."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _autocast_asked() -> Iterator[None]:
    """Libraries that ask whether CUDA's autocast is on are told about the simulated one."""
    enabled = torch.is_autocast_enabled
    answers: dict[str, Any] = {
        "is_autocast_enabled": lambda *kind: enabled(*(kind or ("cpu",))),
        "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype("cpu"),
    }
    with mock.patch.multiple(torch, **answers):
        yield


@contextmanager
def _values_known() -> Iterator[None]:
    """Let transformers ask masks whether they are all ones; `Recorder` says yes."""
    utils = importlib.import_module("transformers.utils.import_utils")
    if not hasattr(utils, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(utils, "is_fake_tensor", return_value=False):
        yield


class SimulatedDevice:
    """A GPU that only its allocations exist of.

    Args:
        step: the step whose GPU, attention and model it simulates.
    """

    def __init__(self, step: Step) -> None:
        self.trace = Trace()
        self.saved_on_host = SavedOnHost(self.trace)
        self._step = step
        self._num_blocks = 0
        self._parameters: list[nn.Parameter] = []
        self._current_block = -1

    @contextmanager
    def libraries(self) -> Iterator[None]:
        """Within it, packages that only a GPU machine has are there; for building and running."""
        job = self._step.job
        with ExitStack() as stack:
            if job.attention is Attention.FLASH:
                stack.enter_context(simulated_flash_attention())
            if job.finetune.is_quantized:
                stack.enter_context(simulated_bitsandbytes())
            yield

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        """Within it, tensors are fake and operators CUDA's; enter the recorder to follow them."""
        capability = self._step.gpu.compute_capability
        recorder = Recorder(
            self.trace,
            workspace=KernelWorkspace(capability),
            call=partial(run_as_cuda, num_experts=num_experts(self._step.job.model.config)),
        )
        with ExitStack() as stack:
            stack.enter_context(cuda_semantics(capability))
            stack.enter_context(_host_support())
            stack.enter_context(_quiet())
            stack.enter_context(_values_known())
            stack.enter_context(_autocast_asked())
            if self._step.method.is_fsdp:
                stack.enter_context(following_fsdp(self.trace))
            stack.enter_context(FakeTensorMode())
            yield recorder

    def follow_weights(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Start the record with this rank's parameters and the buffers.

        Blocks come before what is outside them, as wrappers shard them.
        """
        layers = {id(m): index for index, block in enumerate(blocks) for m in block.modules()}
        modules, units = list(model.modules()), flat_parameters(model)
        if self._step.method.is_fsdp:
            modules.sort(key=lambda module: id(module) not in layers)
        for module in modules:
            layer = layers.get(id(module), NO_LAYER)
            tensors = (
                *module._parameters.values(),
                *module._buffers.values(),
                *vars(module).values(),
            )
            flat = units.get(id(module))
            sizes = transient_bytes(module, flat) if flat is not None or not units else []
            with loading(self.trace, sizes, flat=flat, layer=layer):
                for tensor in tensors:
                    if isinstance(tensor, torch.Tensor):
                        self.trace.follow(local_tensor(tensor), Owner.WEIGHTS, layer=layer)

    def add_buffers(self, sizes: list[int]) -> None:
        """Communication buffers that live as long as the model."""
        for size in sizes:
            self.trace.born(size, Owner.COMMUNICATION_BUFFERS, layer=NO_LAYER)

    def make_batch(self) -> Mapping[str, torch.Tensor]:
        """Token ids and labels, int64, as the Trainer puts them on the GPU."""
        shape = (self._step.micro_batch, self._step.job.seq_len)
        self.trace.default_owner = Owner.INPUTS
        batch = {
            name: torch.empty(shape, dtype=torch.int64, device="cpu")
            for name in ("input_ids", "labels")
        }
        self.trace.default_owner = Owner.TEMPORARIES
        return batch

    def watch_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Own these parameters' gradients whenever `backward()` is over."""
        self._parameters = parameters

    def set_num_blocks(self, count: int) -> None:
        """How many blocks `reached_block` counts over."""
        self._num_blocks = count

    def entered_block(self, index: int) -> None:
        """The forward pass has reached block `index`, or (their number) has left the last one."""
        if not self.trace.backward:
            self.trace.layer = index if index < self._num_blocks else NO_LAYER

    def reached_block(self, index: int) -> None:
        """The backward pass has reached block `index`."""
        if not self.trace.backward or index == self._current_block:
            return
        self._current_block = self.trace.layer = index
        if index == self._num_blocks - 1:
            self.trace.instant = Instant.LAST_BLOCK_BACKWARD
        elif index == 0:
            self.trace.instant = Instant.FIRST_BLOCK_BACKWARD
        else:
            self.trace.instant = Instant.MIDDLE_BLOCK_BACKWARD

    def step_begins(self, step: int) -> None:
        """Optimizer step number `step` begins."""
        self.trace.step = step

    def enters(self, instant: Instant) -> None:
        """The window `instant` begins."""
        trace = self.trace
        if instant is Instant.GRADIENT_SYNC:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    trace.settle(local_tensor(parameter.grad), local_tensor(parameter))
        trace.backward = instant is Instant.LOSS_BACKWARD
        trace.instant = instant
        trace.layer = NO_LAYER
        trace.note_operation(forward=instant is Instant.FORWARD_END)
        self._current_block = -1

    def autocast(self, dtype: torch.dtype) -> Any:
        """CUDA's autocast; fake tensors are the CPU's, with CUDA's lists of operators."""
        return torch.autocast("cpu", dtype=dtype)
