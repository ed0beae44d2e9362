"""One training step on a simulated GPU: build, run twice, read the trace."""

from __future__ import annotations

import importlib.metadata
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from src.errors import UserError
from src.measure.adapters import prepare
from src.measure.assumptions import assumptions, eager_instead
from src.measure.blocks import find_blocks, shorten
from src.measure.build import autocast_dtype, build_model
from src.measure.case import Case
from src.measure.checkpointing import enable_checkpointing
from src.measure.collector import uncollected
from src.measure.coverage import require_covered
from src.measure.events import Owner
from src.measure.extend import NotExtensibleError, expand, extend
from src.measure.ledger import summarize
from src.measure.losses import install_loss
from src.measure.methods import (
    LocalGradients,
    Meshes,
    apply_method,
    build_meshes,
    check_layout,
    ddp_bucket_bytes,
    fake_world,
    local_tensor,
)
from src.measure.optimizers import build_optimizer, host_tensors, state_tensors
from src.measure.quantised import num_elements
from src.measure.reservation import reserve
from src.measure.result import DryRunResult
from src.measure.simulated import SimulatedDevice, materialise
from src.measure.trace import NO_LAYER, Entry, Recorder
from src.measure.training import Training, run_steps, watch_blocks
from src.measure.uniform_dtypes import check_dtypes
from src.spec import Attention, FinetuneKind, Precision

MEASURED_STEP = 2

_UNLIKE_BLOCKS = (FinetuneKind.FREEZE, FinetuneKind.PREFIX)
"""Kinds that do not treat all blocks alike, or keep something of all of them in one tensor."""


def library_versions() -> dict[str, str]:
    """Versions of the libraries whose code the step ran."""
    names = ("torch", "transformers", "peft", "accelerate")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check(case: Case) -> None:
    """Refuse what the dry run cannot run.

    Raises:
        UserError: says why, in one line.
    """
    step, job = case.step, case.step.job
    require_covered(job, step.method, case.loop)
    check_layout(step, case.loop)
    if job.attention is Attention.FLASH:
        if step.gpu.compute_capability < (8, 0):
            raise UserError(
                key="attention",
                value="flash",
                allowed=f"FlashAttention-2 needs compute capability 8.0; {step.gpu.sku} has "
                + ".".join(map(str, step.gpu.compute_capability)),
            )
        if job.precision is Precision.FP32:
            raise UserError(
                key="attention", value="flash", allowed="FlashAttention-2 runs no fp32; use sdpa"
            )


def build(case: Case, *, whole: bool) -> tuple[nn.Module, int]:
    """The case's model on the meta device, with adapters and checkpointing.

    Returns:
        The model, and the number of blocks that it stands for if it was shortened, else 0.
    """
    job, loop = case.step.job, case.loop
    model = build_model(job, loop)
    unlike = job.checkpoint_every > 1 or job.finetune.kind in _UNLIKE_BLOCKS
    depth = 0 if whole or unlike else shorten(model)
    install_loss(model, job, compute_capability=case.step.gpu.compute_capability)
    enable_checkpointing(model, job, loop)
    model = prepare(model, job, case.step.method, loop)
    check_dtypes(model, case)
    return model, depth


def _prepare(
    case: Case, model: nn.Module, blocks: list[nn.Module], depth: int, device: SimulatedDevice
) -> Training:
    step, job, loop = case.step, case.step.job, case.loop
    trainable = [p for p in model.parameters() if p.requires_grad]
    device.follow_weights(model, blocks)
    if step.method.has_ddp and step.layout.dp > 1:
        device.add_buffers(ddp_bucket_bytes(_all_blocks(trainable, blocks, depth)))
    device.watch_gradients(trainable)
    device.set_num_blocks(len(blocks))
    dtype = torch.bfloat16 if loop.autocast_half_weights else autocast_dtype(job.precision)
    device.trace.num_tokens = step.micro_batch * job.model_seq_len
    return Training(
        model=model,
        optimizer=build_optimizer(model, blocks, job, loop),
        make_batch=device.make_batch,
        autocast=None if dtype is None else partial(device.autocast, dtype),
        clip=clipping([local_tensor(p) for p in trainable], loop.max_grad_norm),
        gradients=LocalGradients(trainable),
        loop=loop,
        saving=device.saved_on_host if job.activation_offload else nullcontext,
        grad_accum=job.grad_accum,
    )


def _all_blocks(
    parameters: list[nn.Parameter], blocks: list[nn.Module], depth: int
) -> list[nn.Parameter]:
    """The parameters, those of the blocks that were taken out included."""
    if not depth:
        return parameters
    layers = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    return expand(parameters, [layers.get(id(p), NO_LAYER) for p in parameters], depth)


def vocab_size(model: nn.Module) -> int:
    """Rows of the output embedding; 0 where there is none."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return int(head.weight.shape[0]) if head is not None else 0


def clipping(parameters: list[torch.Tensor], max_norm: float) -> partial[torch.Tensor] | None:
    """Clips the gradients of `parameters`; None for no limit."""
    if not max_norm:
        return None
    return partial(nn.utils.clip_grad_norm_, parameters, max_norm, foreach=True)


def dry_run(case: Case, *, whole: bool = False) -> DryRunResult:
    """Peaks of the case's second optimizer step.

    Of a model whose inner blocks are alike, five blocks are run and the trace is extended to all of
    them; where its shape does not allow that, all are run.

    Args:
        case: the step and its loop.
        whole: run every block.

    Raises:
        UserError: the case cannot be built or simulated.
    """
    check(case)
    with uncollected():
        try:
            return _simulate(case, whole=whole)
        except NotExtensibleError:
            return _simulate(case, whole=True)


def _simulate(case: Case, *, whole: bool) -> DryRunResult:
    device = SimulatedDevice(case.step)
    with warnings.catch_warnings(), device.libraries():
        warnings.simplefilter("ignore")
        model, depth = build(case, whole=whole)
        counts = count_parameters(model, depth)
        notes = (*assumptions(case), *eager_instead(case, model))
        with fake_world(case.step.layout.num_gpus):
            meshes = build_meshes(case.step, device_type="cpu")
            try:
                with device.running() as recorder:
                    entries = _run(case, model, depth, meshes, device, recorder)
            except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
                raise _cannot_simulate(case, error) from error
    if depth:
        entries = extend(entries, depth)
    result = _result(case, entries, notes)
    return replace(
        result,
        saved_on_host_bytes=device.saved_on_host.num_bytes(depth),
        num_parameters=counts[0],
        num_trainable_parameters=counts[1],
    )


def count_parameters(model: nn.Module, depth: int) -> tuple[int, int]:
    """Parameters of the model without its adapters, and those that are trained with them."""
    added = {
        id(p)
        for name, p in model.named_parameters()
        if ".lora_" in name or name.startswith("prompt_encoder.")
    }
    sizes = {
        id(parameter): num_elements(module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    every = _all_blocks(list(model.parameters()), find_blocks(model), depth)
    own = sum(sizes[id(p)] for p in every if id(p) not in added)
    return own, sum(sizes[id(p)] for p in every if p.requires_grad)


def _cannot_simulate(case: Case, error: Exception) -> UserError:
    """The model's code does something that fake tensors refuse: say what, in one line."""
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return UserError(
        key="model",
        value=case.step.job.model.name,
        allowed=f"its step cannot be simulated: {type(error).__name__}: {reason[:300]}",
    )


def _run(
    case: Case,
    model: nn.Module,
    depth: int,
    meshes: Meshes,
    device: SimulatedDevice,
    recorder: Recorder,
) -> list[Entry]:
    """Two steps; the trace."""
    blocks = find_blocks(model)
    watch_blocks(blocks, entered=device.entered_block, reached=device.reached_block)
    device.trace.vocab_sizes = frozenset({vocab_size(model)})
    materialise(model)
    model = apply_method(model, blocks, case, meshes)
    with recorder:
        training = _prepare(case, model, blocks, depth, device)

        def after_first() -> None:
            device.trace.own(state_tensors(training.optimizer), Owner.OPTIMIZER_STATES)
            device.trace.forget(host_tensors(training.optimizer))

        run_steps(training, device, after_first=after_first)
        return list(device.trace.entries)


def _result(case: Case, entries: list[Entry], notes: tuple[str, ...]) -> DryRunResult:
    result = summarize(entries, step=MEASURED_STEP, versions=library_versions(), notes=notes)
    reservation = reserve(
        result.events,
        gpu=case.step.gpu,
        layout=case.step.layout,
        measured_step=MEASURED_STEP,
    )
    return replace(result, reservation=reservation, measured_step=MEASURED_STEP)
