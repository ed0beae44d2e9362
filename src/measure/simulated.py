"""The simulated device: fake tensors on the CPU with CUDA's semantics, every storage followed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from src.measure.cuda_semantics import cuda_semantics
from src.measure.flash import simulated_flash_attention
from src.measure.kernels import KernelWorkspace, as_cuda_returns
from src.measure.result import Instant, Owner
from src.measure.trace import Recorder, Trace
from src.spec import Attention, Step

ASSUMED_STEP = 2.0
"""Value of the optimizer's step counter; no size depends on it."""


def materialise(model: nn.Module) -> None:
    """Replace every meta parameter and buffer by a fake tensor, tied ones once."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                new.__dict__.update(tensor.__dict__)
            made[id(tensor)] = (tensor, new)
        return made[id(tensor)][1]

    for module in model.modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for store in stores:
            for name, value in store.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    store[name] = real(value)


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


class SimulatedDevice:
    """A GPU that only its allocations exist of.

    Args:
        step: the step whose GPU, attention and model it simulates.
    """

    def __init__(self, step: Step) -> None:
        self.trace = Trace()
        self._step = step
        self._num_blocks = 0
        self._current_block = -1

    def libraries(self) -> AbstractContextManager[None]:
        """Within it, packages that only a GPU machine has are there; for building and running."""
        if self._step.job.attention is Attention.FLASH:
            return simulated_flash_attention()
        return nullcontext()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, tensors are fake, operators are CUDA's and every storage is followed."""
        capability = self._step.gpu.compute_capability
        recorder = Recorder(self.trace, workspace=KernelWorkspace(capability), fix=as_cuda_returns)
        with ExitStack() as stack:
            stack.enter_context(cuda_semantics(capability))
            stack.enter_context(_host_support())
            stack.enter_context(FakeTensorMode())
            stack.enter_context(recorder)
            yield

    def load(self, model: nn.Module) -> None:
        """Give the model its (fake) weights."""
        self.trace.default_owner = Owner.WEIGHTS
        materialise(model)
        self.trace.default_owner = Owner.TEMPORARIES

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

    def watch_gradients(self, model: nn.Module) -> None:
        """Own every parameter's gradient as soon as it is accumulated."""

        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.trace.own([parameter.grad], Owner.GRADIENTS)

        for parameter in model.parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(accumulated)

    def set_num_blocks(self, count: int) -> None:
        """How many blocks `reached_block` counts over."""
        self._num_blocks = count

    def reached_block(self, index: int) -> None:
        """The backward pass has reached block `index`."""
        if not self.trace.backward or index == self._current_block:
            return
        self._current_block = index
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
        trace.backward = instant is Instant.LOSS_BACKWARD
        trace.instant = instant
        trace.note_operation(forward=instant is Instant.FORWARD_END)
        self._current_block = -1

    def autocast(self, dtype: torch.dtype) -> Any:
        """CUDA's autocast; fake tensors are the CPU's, with CUDA's lists of operators."""
        return torch.autocast("cpu", dtype=dtype)
