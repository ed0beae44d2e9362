"""From a run of Hugging Face Trainer, as it stands in memory, to the step that it is.

What is read is what runs (the model's modules, the optimizer's groups, the batches), rather than
what was asked for. What a step cannot say is refused, so that no row claims another step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from src.errors import UserError
from src.integrations.sharding import read_sharding
from src.measure.blocks import find_blocks
from src.measure.build import ATTENTION_IMPLEMENTATIONS
from src.measure.case import Case
from src.measure.options import LoopOptions
from src.spec import (
    Attention,
    Checkpointing,
    Finetune,
    FinetuneKind,
    Gpu,
    Job,
    Layout,
    Method,
    Model,
    Optimizer,
    Precision,
    Step,
    refusal,
)

_HAS_TO_BE_OFF = (
    "torch_compile",
    "use_liger_kernel",
    "neftune_noise_alpha",
    "label_smoothing_factor",
    "torch_empty_cache_steps",
    "parallelism_config",
    "ddp_bucket_cap_mb",
    "ddp_static_graph",
    "deepspeed",
)
"""Arguments of the Trainer that change what a step keeps, in ways that no case has a word for."""

_INPUTS = {"input_ids", "labels", "attention_mask", "num_items_in_batch"}
_NOT_THE_MODELS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_LORA_FIELDS: Mapping[str, object] = {
    "bias": "none",
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": None,
    "layer_replication": None,
}
"""Fields of PEFT's `LoraConfig` that a case does not have, and the values that it stands for."""

_BITSANDBYTES = {
    ("AdamW", 8, False): Optimizer.ADAMW_8BIT,
    ("AdamW", 32, True): Optimizer.PAGED_ADAMW,
    ("AdamW", 8, True): Optimizer.PAGED_ADAMW_8BIT,
    ("Lion", 32, False): Optimizer.LION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One micro batch as it reached the model.

    Attributes:
        names: of its inputs.
        shape: sequences and tokens of each.
        num_tokens: those that the attention mask lets through; None where there is no mask. A
            tensor, so that nothing waits for the GPU within the step.
    """

    names: frozenset[str]
    shape: tuple[int, ...]
    num_tokens: torch.Tensor | None

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Seen:
        """What the model is called with; nothing of it is kept."""
        tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        return cls(
            names=frozenset(name for name, value in inputs.items() if value is not None),
            shape=() if tokens is None else tuple(tokens.shape),
            num_tokens=None if mask is None else mask.detach().sum(),
        )

    @property
    def num_positions(self) -> int:
        """Sequences times tokens."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def refuse(key: str, value: object, why: str) -> UserError:
    """The error that says why a run is no case."""
    return UserError(key=key, value=value, allowed=why)


def check_arguments(arguments: Any) -> None:
    """Refuse what no case has a word for.

    Raises:
        UserError: names the argument of the Trainer.
    """
    for name in _HAS_TO_BE_OFF:
        if getattr(arguments, name, None):
            raise refuse(name, getattr(arguments, name), "no case says what it changes")
    if arguments.n_gpu > 1:
        raise refuse("gpus", arguments.n_gpu, "DataParallel is no method; start it with torchrun")


def read_case(
    arguments: Any, model: nn.Module, optimizer: Any, batches: Sequence[Seen], gpu: Gpu
) -> Case:
    """The case that the step of these micro batches is.

    Args:
        arguments: the Trainer's `TrainingArguments`.
        model: as it is trained, with adapters and FSDP's wrappers.
        optimizer: as it is stepped.
        batches: the step's micro batches, one or more.
        gpu: the GPU it runs on.

    Raises:
        UserError: no case says what runs here; names what it is.
    """
    _check_model(model)
    micro_batch, seq_len, has_mask = _read_shape(batches)
    base = base_model(model)
    precision, is_autocast = _read_precision(model)
    method, layout, loop, fp32_reduce = _read_spread(arguments, model, precision)
    optimizer = innermost(optimizer)
    checkpointing, is_reentrant = _read_checkpointing(base)
    job = Job(
        model=_read_model(base),
        finetune=_read_finetune(model),
        seq_len=seq_len,
        grad_accum=len(batches),
        precision=precision,
        optimizer=_read_optimizer(optimizer),
        checkpointing=checkpointing,
        attention=_read_attention(base),
        fp32_reduce=fp32_reduce,
    )
    loop |= {
        "max_grad_norm": float(arguments.max_grad_norm or 0),
        "reentrant_checkpointing": is_reentrant,
        "trainer_groups": _has_two_groups(optimizer),
        "attention_mask_input": has_mask,
        "autocast_half_weights": is_autocast and precision is Precision.BF16_TRUE,
        "use_cache": bool(getattr(base.config, "use_cache", False)),
        "fp32_adapters": _are_adapters_fp32(model),
    }
    impossible = refusal(job, method, autocasts=bool(loop["autocast_half_weights"]))
    if impossible is not None:
        raise impossible
    step = Step(job=job, method=method, layout=layout, gpu=gpu, micro_batch=micro_batch)
    return Case(step=step, loop=LoopOptions(**loop), device="cuda")


def base_model(model: nn.Module) -> Any:
    """The model of transformers inside PEFT's."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def _check_model(model: nn.Module) -> None:
    """Refuse code that is not the model's own: compiled, patched, wrapped in something else."""
    for name, module in model.named_modules():
        classes = {kind.__module__ for kind in type(module).__mro__}
        if type(module).__name__ in ("OptimizedModule", "CheckpointWrapper"):
            raise refuse("model", type(module).__name__, "no case says what it keeps")
        is_patched = type(module).forward.__module__ not in classes
        # accelerate gives the whole model a forward of its own, which switches autocast on.
        is_patched |= name != "" and "forward" in vars(module)
        if is_patched:
            raise refuse("model", name or type(module).__name__, "its forward was replaced")
    if "_loss_function" in vars(base_model(model)):
        raise refuse("loss", "loss_function", "the model's own was replaced")


def _read_shape(batches: Sequence[Seen]) -> tuple[int, int, bool]:
    """Sequences, tokens, and whether there is a mask; the same in all micro batches."""
    shapes = {batch.shape for batch in batches}
    if len(shapes) != 1:
        raise refuse("batch", sorted(shapes), "micro batches of one step differ in shape")
    shape = shapes.pop()
    for batch in batches:
        others = batch.names - _INPUTS
        if others:
            raise refuse("batch", ", ".join(sorted(others)), "a case has no such input")
        if "labels" not in batch.names or len(shape) != 2:
            raise refuse("batch", ", ".join(sorted(batch.names)), "needs input_ids and labels")
    return shape[0], shape[1], any("attention_mask" in batch.names for batch in batches)


def padding_share(batches: Sequence[Seen]) -> float:
    """Share of the positions that the attention masks leave out."""
    masked = [batch for batch in batches if batch.num_tokens is not None]
    size = sum(batch.num_positions for batch in masked)
    kept = sum(int(batch.num_tokens) for batch in masked if batch.num_tokens is not None)
    return 1 - kept / size if size else 0.0


def _read_model(base: Any) -> Model:
    config = json.loads(base.config.to_json_string(use_diff=False))
    if config.get("quantization_config"):
        raise refuse("quantization_config", "...", "quantised models are not read yet")
    name = str(getattr(base.config, "_name_or_path", "") or "")
    # Anything else may be a folder of the user's.
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~")) and "\\" not in name
    return Model(
        name=name.rpartition("/")[2] if is_hub_id else str(config.get("model_type")),
        hf_id=name if is_hub_id else None,
        config={key: value for key, value in config.items() if key not in _NOT_THE_MODELS},
    )


def _read_finetune(model: nn.Module) -> Finetune:
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return _read_frozen(model)
    if len(configs) != 1:
        raise refuse("finetune", ", ".join(configs), "more than one adapter")
    (config,) = configs.values()
    kind = type(config).__name__
    if kind != "LoraConfig":
        raise refuse("finetune", kind, "of PEFT's methods LoRA alone is read")
    for name, usual in _LORA_FIELDS.items():
        value = getattr(config, name, usual)
        if value != usual and (value or usual):
            raise refuse(f"finetune.{name}", value, "no case has it")
    targets = config.target_modules
    if isinstance(targets, str) or any("." in target for target in targets):
        raise refuse("finetune.targets", targets, "only plain names of Linears")
    return Finetune(
        kind=FinetuneKind.LORA,
        r=config.r,
        alpha=round(config.lora_alpha),
        dropout=config.lora_dropout,
        targets=tuple(sorted(targets)),
        dora=config.use_dora,
    )


def _read_frozen(model: nn.Module) -> Finetune:
    if all(parameter.requires_grad for parameter in model.parameters()):
        return Finetune()
    trained = [
        any(parameter.requires_grad for parameter in block.parameters())
        for block in find_blocks(model)
    ]
    if not any(trained):
        raise refuse("finetune", "frozen", "no block is trained")
    return Finetune(kind=FinetuneKind.FREEZE, trained_blocks=sum(trained))


def _base_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield parameter


def _are_adapters_fp32(model: nn.Module) -> bool:
    found = [p for name, p in model.named_parameters() if ".lora_" in name]
    return all(parameter.dtype is torch.float32 for parameter in found)


def _read_precision(model: nn.Module) -> tuple[Precision, bool]:
    """The precision, and whether there is autocast."""
    from accelerate.state import AcceleratorState

    autocast = str(AcceleratorState().mixed_precision)
    weights = {parameter.dtype for parameter in _base_parameters(model)}
    known = {
        ("no", torch.float32): Precision.FP32,
        ("bf16", torch.float32): Precision.BF16_MIXED,
        ("fp16", torch.float32): Precision.FP16_MIXED,
        ("no", torch.bfloat16): Precision.BF16_TRUE,
        ("bf16", torch.bfloat16): Precision.BF16_TRUE,
    }
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights))
    found = known.get((autocast, weights.pop())) if len(weights) == 1 else None
    if found is None:
        raise refuse("precision", f"{names} weights, {autocast} autocast", "no case has both")
    return found, autocast != "no"


def _read_spread(
    arguments: Any, model: nn.Module, precision: Precision
) -> tuple[Method, Layout, dict[str, Any], bool]:
    num_gpus = int(arguments.world_size)
    sharding = read_sharding(model, precision, num_gpus=num_gpus)
    if sharding is not None:
        loop = {"fsdp_split_root": sharding.has_split_root}
        return sharding.method, sharding.layout, loop, sharding.fp32_reduce
    method = Method.SINGLE if num_gpus == 1 else Method.DDP
    return method, Layout(dp=num_gpus), {}, False


def _read_attention(base: Any) -> Attention:
    name = base.config._attn_implementation
    known = {words or "sdpa": kind for kind, words in ATTENTION_IMPLEMENTATIONS.items()}
    if name not in known:
        raise refuse("attention", name, f"none of {', '.join(known)}")
    return known[name]


def _read_checkpointing(base: nn.Module) -> tuple[Checkpointing, bool]:
    """Which activations are recomputed, and whether by the reentrant function."""
    blocks = find_blocks(base)
    flagged = [block for block in blocks if hasattr(block, "gradient_checkpointing")]
    modules = flagged or [m for m in base.modules() if hasattr(m, "gradient_checkpointing")]
    switches = {bool(module.gradient_checkpointing) for module in modules}
    if switches == {True, False}:
        raise refuse("checkpointing", "some blocks", "all blocks or none")
    if True not in switches:
        return Checkpointing.NONE, False
    call = getattr(modules[0], "_gradient_checkpointing_func", None)
    is_reentrant = getattr(call, "keywords", {}).get("use_reentrant")
    if not isinstance(is_reentrant, bool):
        raise refuse("checkpointing", "a function of its own", "transformers' checkpointing")
    return Checkpointing.FULL, is_reentrant


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _has_two_groups(optimizer: Any) -> bool:
    number = len(optimizer.param_groups)
    if number > 2:
        raise refuse("optimizer", f"{number} groups", "one group, or with and without decay")
    return number == 2


def _read_optimizer(optimizer: Any) -> Optimizer:
    group, kind = optimizer.param_groups[0], type(optimizer).__name__
    library = type(optimizer).__module__.partition(".")[0]
    found = None
    if library == "torch" and kind == "AdamW" and not group.get("amsgrad"):
        found = Optimizer.ADAMW_FUSED if group.get("fused") else Optimizer.ADAMW
        if not group.get("fused") and group.get("foreach") is False:
            found = Optimizer.ADAMW_LOOP
    elif library == "torch" and kind == "SGD" and group.get("foreach") is not False:
        plain = not (group.get("nesterov") or group.get("fused"))
        found = Optimizer.SGD_MOMENTUM if group.get("momentum") else Optimizer.SGD
        found = found if plain else None
    elif library == "bitsandbytes":
        bits, is_paged = getattr(optimizer.args, "optim_bits", 32), bool(optimizer.is_paged)
        found = _BITSANDBYTES.get((kind, bits, is_paged))
    elif library == "transformers" and kind == "Adafactor" and group.get("beta1") is None:
        found = Optimizer.ADAFACTOR
    if found is None:
        raise refuse("optimizer", f"{library}.{kind}", "no case has it with these options")
    return found
