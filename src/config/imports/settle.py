"""From facts to our keys: what only several facts together decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from src.config.imports.collect import Collected
from src.config.imports.imported import Fact
from src.config.imports.reading import file_error
from src.config.keys import KEYS
from src.config.model import resolve_model
from src.errors import UserError
from src.spec import FINETUNE_OPTIONS, FinetuneKind

_ZERO3_SIZES = ("zero.prefetch_bucket_size", "zero.param_persistence_threshold")


_WHOLE = ("None", "none", "full")


@dataclass(kw_only=True, slots=True)
class Settling:
    """The keys as they are decided one after the other.

    Attributes:
        collected: what the files say.
        typed: what was typed, which goes first.
        keys: our keys and where each comes from.
    """

    collected: Collected
    typed: Mapping[str, Any]
    keys: dict[str, Fact] = field(default_factory=dict)

    def says(self, name: str) -> Any:
        """What is typed, or said by a file, or None."""
        if name in self.typed:
            return self.typed[name]
        fact = self.collected.facts.get(name)
        return None if fact is None else fact.value

    def set(self, key: str, value: Any, *sources: str) -> None:
        """Decide a key, by the first of the facts that there is."""
        facts = self.collected.facts
        source = next((facts[name] for name in sources if name in facts), None)
        if source is None:
            file, form = self.collected.formats[0]
            source = Fact(value=value, file=file, written=f"{key} ({form.name}'s default)")
        self.keys[key] = Fact(value=value, file=source.file, written=source.written)

    def warn(self, text: str) -> None:
        """Tell something about the whole."""
        self.collected.warnings.append(f"from: {text}")

    def refuse(self, name: str, reason: str) -> UserError:
        """The error about a fact."""
        fact = self.collected.facts[name]
        return file_error(f"{fact.file}: {fact.written}", reason)


def settle(collected: Collected, typed: Mapping[str, Any]) -> dict[str, Fact]:
    """Our keys, with where each comes from.

    Raises:
        UserError: the facts together are none of our jobs.
    """
    settling = Settling(collected=collected, typed=typed)
    _add_defaults(settling)
    for name, fact in collected.facts.items():
        is_one = name == "tp" and fact.value <= 1
        if name in KEYS and not name.startswith("finetune.") and not is_one:
            settling.keys[name] = fact
    _method(settling)
    _optimizer(settling)
    _finetune(settling)
    _precision(settling)
    _batch(settling)
    _zero_sizes(settling)
    return {key: fact for key, fact in settling.keys.items() if key not in typed}


def _add_defaults(settling: Settling) -> None:
    """What the training's program does where its file says nothing."""
    facts = settling.collected.facts
    training = next((pair for pair in settling.collected.formats if pair[1].is_training), None)
    if training is None:
        return
    file, form = training
    added = []
    for name, value in form.defaults.items():
        if name in facts or (name == "bf16" and settling.says("fp16")):
            continue
        facts[name] = Fact(value=value, file=file, written=f"{name} ({form.name}'s default)")
        if name in KEYS and name not in settling.typed and "." not in name:
            added.append(f"{name}={value}")
    if added:
        settling.warn(f"by {form.name}'s defaults: {', '.join(added)}")
    if not {"seq_len"} & {*facts, *settling.typed}:
        settling.warn("no file says how long sequences are: seq_len is this program's default")
    if form.caveat and not {"precision", "loss"} & settling.typed.keys():
        settling.warn(f"{form.name}: {form.caveat}")


def _method(settling: Settling) -> None:
    launcher, spread = settling.says("launcher"), str(settling.says("spread") or "")
    spread, _, offloads = spread.partition(" ")
    method = {"single": "single", "ddp": "ddp", "tp": "tp"}.get(launcher, spread)
    if launcher == "sharded" or spread.startswith(("fsdp", "hsdp")):
        method = settling.says("reshard") or (spread if not spread.startswith("zero") else "")
        method = method or "fsdp"
        _fsdp(settling, method, offloads)
    if method == "ddp" and settling.says("gpus") == 1:
        method = "single"
    if not method:
        what = "DeepSpeed's stage" if launcher else "how the job is spread"
        if "method" not in settling.typed:
            settling.warn(f"no file says {what}: every method is answered")
        return
    if settling.says("tp") is not None and settling.says("tp") > 1:
        method = {"ddp": "ddp+tp", "fsdp": "fsdp+tp"}.get(method, method)
    elif method == "tp":
        settling.set("tp", settling.says("gpus"), "launcher")
    settling.set("method", [method], "reshard" if launcher == "sharded" else "spread", "launcher")
    if method.startswith("zero"):
        for name in ("offload_weights", "offload_states"):
            if settling.says(name) and "offload" not in settling.keys:
                settling.set("offload", settling.says(name), name)


def _fsdp(settling: Settling, method: str, offloads: str) -> None:
    if offloads:
        settling.set("offload", "all", "spread")
    if settling.says("fsdp_checkpointing"):
        settling.set("checkpointing", "full", "fsdp_checkpointing")
    if settling.says("fsdp_version") != 2 and method != "ddp":
        settling.warn("FSDP1 is counted as FSDP2 (fully_shard), whose bytes are about the same")


def _optimizer(settling: Settling) -> None:
    """DeepSpeed's own optimizer goes before the Trainer's."""
    engine = settling.says("engine_optimizer")
    if engine is not None:
        settling.set("optimizer", engine, "engine_optimizer")


def _finetune(settling: Settling) -> None:
    adapter, bits = settling.says("adapter"), _bits(settling)
    if "finetune" in settling.typed:
        kind = str(settling.typed["finetune"])
    elif adapter is None:
        return
    elif bits and adapter != "lora":
        source = next(name for name in ("bits", "bits4", "bits8") if settling.says(name))
        raise settling.refuse(source, "a quantised model is trained through adapters alone")
    else:
        kind = {"none": "full", "lora": "qlora" if bits else "lora"}.get(adapter, adapter)
        settling.set("finetune", kind, "adapter")
    options = FINETUNE_OPTIONS.get(FinetuneKind(kind), ()) if kind in list(FinetuneKind) else ()
    for name in options:
        key = f"finetune.{name}"
        if key in settling.collected.facts:
            settling.keys[key] = settling.collected.facts[key]
    if "targets" in options:
        _targets(settling)
    if "quantization" in options and bits == 8:
        settling.set("finetune.quantization", "int8", "bits8", "bits")


def _targets(settling: Settling) -> None:
    if settling.says("all_linear"):
        settling.set("finetune.targets", ["all-linear"], "all_linear")
    elif "finetune.targets" not in {*settling.keys, *settling.typed}:
        settling.warn("no file names LoRA's targets: the attention projections are taken")


def _bits(settling: Settling) -> int:
    if settling.says("bits4") and settling.says("bits8"):
        raise settling.refuse("bits8", "4 bits or 8, not both")
    if settling.says("bits4"):
        return 4
    return 8 if settling.says("bits8") else int(settling.says("bits") or 0)


def _precision(settling: Settling) -> None:
    half, autocast = settling.says("half"), settling.says("autocast")
    weights = settling.says("weights")
    if settling.says("bf16") and settling.says("fp16"):
        raise settling.refuse("fp16", "bf16 or fp16, not both")
    if half is not None:
        autocast = "no" if half in ("full", "no") else half
        weights = "fp32" if half == "no" else "bf16"
    for dtype in ("bf16", "fp16"):
        if settling.says(dtype):
            autocast = dtype
            weights = dtype if half is not None else weights
    if autocast is None:
        if settling.says("bf16") is None or settling.says("fp16") is None:
            return
        autocast = "no"
    weights = "bf16" if settling.says("pure") else _stored(settling, weights, autocast)
    found = _joined(settling, autocast, weights)
    settling.set("precision", found, "bf16", "fp16", "half", "pure", "autocast")


def _stored(settling: Settling, weights: Any, autocast: str) -> str:
    """The dtype of the weights as they are loaded."""
    if weights == "auto":
        settling.warn("the checkpoint's own dtype is taken to be bf16")
        return "bf16"
    if weights is None and settling.says("adapter") == "lora" and autocast != "no":
        return autocast
    return str(weights or "fp32")


def _joined(settling: Settling, autocast: str, weights: str) -> str:
    """The precision of weights of a dtype under autocast, or without it."""
    method = _one_method(settling)
    is_whole = str(settling.typed.get("finetune", settling.says("adapter"))) in _WHOLE
    is_sharded = method.startswith(("fsdp", "hsdp"))
    if method.startswith("zero"):
        mixed = autocast if autocast != "no" else weights
        return "fp32" if mixed == "fp32" else f"{mixed}-mixed"
    if autocast != "no" and (weights == "fp32" or (is_whole and is_sharded)):
        return f"{autocast}-mixed"
    if weights == "fp32":
        return "fp32"
    if weights == "fp16":
        if autocast == "fp16" and is_whole:
            return "fp16-mixed"
        settling.warn("fp16 weights are counted as bf16-true, whose bytes are the same")
    return "bf16-true"


def _one_method(settling: Settling) -> str:
    """The method, where there is only one."""
    said = settling.keys.get("method")
    methods = settling.typed.get("method", [] if said is None else said.value)
    methods = [methods] if isinstance(methods, str) else list(methods)
    return str(methods[0]) if len(methods) == 1 else ""


def _batch(settling: Settling) -> None:
    gpus, nodes = settling.says("gpus"), settling.says("nodes")
    if nodes is not None and nodes > 1 and gpus is not None:
        if gpus % nodes:
            raise settling.refuse("nodes", f"{gpus} GPUs are not divided by it")
        settling.set("gpus_per_node", gpus // nodes, "nodes")
    whole, micro = settling.says("global_batch"), "micro_batch" in settling.collected.facts
    is_said = "micro_batch" in settling.collected.from_training
    if whole is None or "micro_batch" in settling.typed or is_said:
        return
    if micro and not settling.collected.facts["micro_batch"].written.endswith("default)"):
        return
    per_step = (gpus or 0) * (settling.says("grad_accum") or 1)
    if not per_step or whole % per_step:
        settling.warn(f"the batch of {whole} is not split into micro batches: gpus=, grad_accum=")
        return
    settling.set("micro_batch", whole // per_step, "global_batch")


def _zero_sizes(settling: Settling) -> None:
    """The Trainer fills `auto` from the hidden size h: h^2, 0.9 h^2 and 10 h elements."""
    keys = [key for key, fact in settling.keys.items() if fact.value == "auto"]
    if not keys:
        return
    hidden = _hidden_size(settling)
    sizes: dict[str, int] = {} if hidden is None else dict(_sizes(hidden))
    for key in keys:
        fact = settling.keys.pop(key)
        if key in sizes and (key not in _ZERO3_SIZES or settling.says("spread") == "zero3"):
            settling.keys[key] = Fact(value=sizes[key], file=fact.file, written=fact.written)
    if hidden is None:
        settling.warn("auto bucket sizes need the model's hidden size: DeepSpeed's own are taken")


def _sizes(hidden: int) -> Iterator[tuple[str, int]]:
    yield "zero.reduce_bucket_size", hidden * hidden
    yield "zero.prefetch_bucket_size", int(0.9 * hidden * hidden)
    yield "zero.param_persistence_threshold", 10 * hidden


def _hidden_size(settling: Settling) -> int | None:
    name = settling.says("model")
    if not isinstance(name, str):
        return None
    arch = {
        key.partition(".")[2]: value
        for key, value in settling.typed.items()
        if key.startswith("arch.")
    }
    try:
        model, _ = resolve_model(name, arch=arch, trust_remote_code=False)
    except UserError:
        return None
    sizes = (model.config.get(key) for key in ("hidden_size", "n_embd", "d_model"))
    return next((size for size in sizes if isinstance(size, int)), None)
