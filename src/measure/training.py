"""The training step as the Trainer runs it; nothing here knows whether the device is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from src.measure.events import Instant
from src.measure.methods import LocalGradients
from src.measure.options import LoopOptions

HALF = (torch.float16, torch.bfloat16)


class Observer(Protocol):
    """Told where in the step the run is."""

    def step_begins(self, step: int) -> None:
        """Optimizer step number `step` (1, 2, ...) begins."""

    def enters(self, instant: Instant) -> None:
        """The window `instant` begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model ready to train.

    Attributes:
        model: what is called; wrapped by the method.
        optimizer: over its trainable parameters.
        make_batch: the inputs of one micro step, on the device.
        autocast: a fresh autocast context; None without mixed precision.
        clip: clips the gradients; None without clipping.
        gradients: hands gradients of distributed parameters to the optimizer.
        loop: options of the loop.
        saving: around a forward pass: where what it saves for the backward pass is kept.
        grad_accum: micro steps per optimizer step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_batch: Callable[[], Mapping[str, torch.Tensor]]
    autocast: Callable[[], Any] | None
    clip: Callable[[], object] | None
    gradients: LocalGradients
    loop: LoopOptions
    saving: Callable[[], AbstractContextManager[object]] = nullcontext
    grad_accum: int = 1


def in_fp32(value: Any) -> Any:
    """A model's output with half-precision tensors in fp32 (`convert_outputs_to_fp32`)."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, Mapping):
        return type(value)(**{key: in_fp32(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(in_fp32(item) for item in value)
    return value


def forward(training: Training, batch: Mapping[str, torch.Tensor]) -> Any:
    """The model's outputs, as accelerate's wrapped `forward` gives them."""
    if training.autocast is None:
        return training.model(**batch)
    with training.autocast():
        outputs = training.model(**batch)
    return in_fp32(outputs)


def compute_loss(
    training: Training, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, object]:
    """The loss over `grad_accum`, and what the loop keeps of the outputs (the Trainer: nothing)."""
    model_inputs = {key: value for key, value in batch.items() if key != "attention_mask"}
    with training.saving():
        outputs = forward(training, model_inputs)
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    kept = outputs if training.loop.hold_outputs else None
    if training.grad_accum > 1:
        loss = loss / training.grad_accum
    return loss, kept


@contextmanager
def reducing(model: nn.Module, *, on: bool) -> Iterator[None]:
    """Whether sharded gradients are reduced in this micro step (accelerate's `no_sync`).

    Until the last micro step FSDP keeps whole gradients. Others have nothing to switch: replicas
    are one process here.
    """
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is not None:
        switch(on)
        yield
    elif not on and hasattr(model, "no_sync"):
        with model.no_sync():  # type: ignore[operator]
            yield
    else:
        yield


def backward(loss: torch.Tensor, *, at_end: Callable[[], None]) -> None:
    """Backward pass from `loss`; `at_end` is called when the graph has been walked.

    That is in front of what methods do then: FSDP reduces its root's gradients. The engine calls in
    the order of queueing (`queue_callback`, which FSDP and DDP use too), so what queues is reached
    before the hooks that FSDP has on the loss: an alias of it.
    """
    engine = torch.autograd.Variable._execution_engine
    alias = loss.view_as(loss)
    alias.register_hook(lambda _grad: engine.queue_callback(at_end))  # type: ignore[no-untyped-call]
    alias.backward()  # type: ignore[no-untyped-call]


def run_step(training: Training, observer: Observer) -> None:
    """One optimizer step; all its micro batches are on the device from the start."""
    observer.enters(Instant.FORWARD_END)
    batches = [training.make_batch() for _ in range(training.grad_accum)]
    for number, batch in enumerate(batches, start=1):
        observer.enters(Instant.FORWARD_END)
        with reducing(training.model, on=number == training.grad_accum):
            loss, kept = compute_loss(training, batch)
            observer.enters(Instant.LOSS_BACKWARD)
            if number == training.grad_accum:
                backward(loss, at_end=lambda: observer.enters(Instant.GRADIENT_SYNC))
            else:
                loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        del kept
    observer.enters(Instant.GRADIENT_SYNC)
    training.gradients.hand_over()
    if training.clip is not None:
        training.clip()
    observer.enters(Instant.OPTIMIZER_STEP)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    training.gradients.clear()


def run_steps(training: Training, observer: Observer, *, after_first: Callable[[], None]) -> None:
    """Two optimizer steps; `after_first` is called between them."""
    for step in (1, 2):
        observer.step_begins(step)
        run_step(training, observer)
        if step == 1:
            after_first()


def watch_blocks(
    blocks: Sequence[nn.Module], *, entered: Callable[[int], None], reached: Callable[[int], None]
) -> None:
    """Tell which block the forward or the backward pass is in.

    `entered(i)` is called when block i runs, `entered(len(blocks))` when the last one has run, and
    `reached(i)` when block i's output has its gradient or its recomputation begins.

    The output's tensor hook serves blocks whose activations are kept; under checkpointing a child
    that runs while `backward()` is under way says the same. `reached` ignores calls outside
    `backward()`.
    """

    def output_hook(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: reached(index))  # type: ignore[no-untyped-call]

        return hook

    def child_hook(index: int) -> Callable[..., None]:
        return lambda _module, _args: reached(index)

    def entry_hook(index: int) -> Callable[..., None]:
        return lambda *_args: entered(index)

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(entry_hook(index))
        block.register_forward_hook(output_hook(index))
        for child in block.children():
            child.register_forward_pre_hook(child_hook(index))
    blocks[-1].register_forward_hook(entry_hook(len(blocks)))
