"""The settings of the matrix, and how specs are drawn from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from src.architecture import describe
from src.config.zoo import load
from src.errors import UserError
from src.measure.case import Case, parse_case
from src.measure.dry_run import check
from src.memory import estimate_step, implementation
from src.plan.checks import check as check_request
from src.plan.layouts import tensor_parallel_degrees
from src.spec import Attention, Cluster, Gpu, Loss, Optimizer, Precision, Request
from tests.transformers_models import with_layers

SEED = 20240314
BLOCKS = 4
TRIES = 20
PLAIN_SHARE = 0.5

MODELS = (
    "opt-1.3b", "opt-350m", "bloom-560m", "codegen-350m", "biogpt", "gpt_bigcode-santacoder",
    "gpt-neo-125m", "gpt-j-6b", "pythia-410m", "stablelm-base-alpha-3b", "gpt2-medium",
    "llama-3.2-1b", "llama-2-7b", "tinyllama-1.1b", "mistral-7b-v0.1", "mixtral-8x7b",
    "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma-2b", "gemma-2-2b", "gemma-3-1b",
    "phi-1_5", "phi-3-mini", "falcon-7b", "starcoder2-3b", "olmo-2-1b", "powerlm-3b",
    "bert-base-uncased", "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip
Fragment = Mapping[str, Any]
"""Keys of a case, as `src.measure.worker` takes them."""


def _plain(key: str, *values: Any) -> dict[str, Fragment]:
    return {str(value): {key: value} for value in values}


def _method(name: str, **layout: int) -> Fragment:
    return {"method": name, "layout": layout}


def _finetune(kind: str, **options: Any) -> Fragment:
    return {"finetune": {"kind": kind, **options}}


def _gpu(sku: str) -> Fragment:
    table = load("gpu", sku)
    return {"gpu": {field.name: table[field.name] for field in fields(Gpu)}}


AXES: dict[str, dict[str, Fragment]] = {
    "method": {
        "single": _method("single"),
        "ddp": _method("ddp", dp=4),
        "fsdp": _method("fsdp", dp=4, shard=4),
        "fsdp-grad": _method("fsdp-grad", dp=4, shard=4),
        "hsdp": _method("hsdp", dp=4, shard=2),
        "tp": _method("tp", tp=2),
        "ddp+tp": _method("ddp+tp", dp=2, tp=2),
        "fsdp+tp": _method("fsdp+tp", dp=2, tp=2, shard=2),
    },
    "finetune": {
        "full": _finetune("full"),
        "lora": _finetune("lora"),
        "lora all-linear, dropout": _finetune("lora", targets=["all-linear"], dropout=0.1),
        "dora": _finetune("lora", dora=True),
        "qlora nf4": _finetune("qlora"),
        "qlora nf4, no upcast": _finetune("qlora", double_quant=False, upcast="none"),
        "qlora int8": _finetune("qlora", quantization="int8", upcast="norms"),
        "freeze": _finetune("freeze"),
        "prefix": _finetune("prefix"),
        "prompt": _finetune("prompt"),
    },
    "precision": _plain("precision", *Precision),
    "optimizer": _plain("optimizer", *Optimizer),
    "checkpointing": {
        "full": {"checkpointing": "full"},
        "full, every 2nd": {"checkpointing": "full", "checkpoint_every": 2},
        "selective": {"checkpointing": "selective"},
        "none": {"checkpointing": "none"},
    },
    "loss": _plain("loss", *Loss),
    "attention": _plain("attention", Attention.SDPA, Attention.EAGER, Attention.FLASH),
    "switch": {
        "none": {},
        "activation_offload": {"activation_offload": True},
        "sequence_parallel": {"sequence_parallel": True},
        "fp32_reduce": {"fp32_reduce": True},
    },
    "gpu": {sku: _gpu(sku) for sku in ("a100-80gb", "v100-32gb", "h100-80gb")},
    "grad_accum": _plain("grad_accum", 1, 2),
    "shape": {
        f"{batch} x {seq_len}": {"micro_batch": batch, "seq_len": seq_len}
        for batch, seq_len in ((1, 512), (4, 512), (8, 256), (2, 1024))
    },
}
"""Values of each setting, as keys of a case. `shape` is micro batch x sequence; 512 fits the models
with the shortest tables of positions."""

DEFAULTS: dict[str, str] = {axis: next(iter(values)) for axis, values in AXES.items()}
Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model under one setting: the label of a value for each axis."""

    model: str
    setting: Mapping[str, str]

    def __str__(self) -> str:
        return " ".join([self.model, *(f"{key}={value}" for key, value in self.setting.items())])

    def case(self, *, blocks: int = BLOCKS) -> Case:
        """The spec as the dry run takes it."""
        return parse_case(self.raw(blocks=blocks))

    def raw(self, *, blocks: int = BLOCKS) -> dict[str, Any]:
        """The spec as JSON."""
        entry = load("model", self.model)
        config = with_layers(entry["config"], blocks)
        if "attention_types" in config:
            config["attention_types"] = [[["global", "local"], blocks // 2]]
        raw: dict[str, Any] = {"model": {"name": self.model, "config": config}}
        for axis, label in self.setting.items():
            raw |= AXES[axis][label]
        return raw

    def pairs(self) -> set[Pair]:
        """Every two values that meet in it, the model among them."""
        values = {"model": self.model, **self.setting}
        return set(itertools.combinations(sorted(values.items()), 2))


def is_possible(spec: Spec) -> bool:
    """Whether both can answer."""
    try:
        case = spec.case()
        step, decoder = case.step, describe(case.step.job.model)
        if implementation(decoder, step.job) is not step.job.attention:
            return False
        limit = decoder.max_positions
        if limit is not None and step.job.seq_len > limit:
            return False
        cluster = Cluster(gpu=step.gpu, num_gpus=step.layout.num_gpus, gpus_per_node=8)
        check_request(Request(job=step.job, cluster=cluster), decoder)
        if step.layout.tp > 1:
            if step.layout.tp not in tensor_parallel_degrees(decoder, cluster):
                return False
        elif step.job.sequence_parallel:
            return False
        if step.job.fp32_reduce and not step.method.is_fsdp:
            return False
        check(case)
        estimate_step(step)
    except UserError:
        return False
    return True


def every_pair() -> set[Pair]:
    """Every two values of two axes, the model an axis like the others."""
    axes: dict[str, Iterable[str]] = {"model": MODELS, **AXES}
    found: set[Pair] = set()
    for left, right in itertools.combinations(sorted(axes), 2):
        found |= set(
            itertools.product(*([(axis, v) for v in axes[axis]] for axis in (left, right)))
        )
    return found


def _containing(pair: Pair, rng: random.Random) -> Spec:
    """A spec with both values of a pair; each other axis at its default, or drawn."""
    asked = dict(pair)
    model = asked.pop("model", None) or rng.choice(MODELS)
    setting = {
        axis: default if rng.random() < PLAIN_SHARE else rng.choice(list(AXES[axis]))
        for axis, default in DEFAULTS.items()
    }
    if setting["attention"] not in _implementations(model):
        setting["attention"] = Attention.EAGER.value
    return Spec(model=model, setting=setting | asked)


@lru_cache
def _implementations(model: str) -> frozenset[str]:
    """Attention that transformers has for a model."""
    decoder = describe(Spec(model=model, setting=DEFAULTS).case().step.job.model)
    return frozenset(item.value for item in decoder.implementations)


def draw(count: int | None = None, *, seed: int = SEED) -> tuple[list[Spec], set[Pair]]:
    """Specs in which every pair of values occurs that is possible; the same ones for a seed.

    Each next one has a pair that has not been seen, and as many others of that kind as the best of
    some tries; a pair that no try makes possible is given up.

    Args:
        count: at most so many; None: until no pair is left, at least `LEAST`.
        seed: of the random numbers.

    Returns:
        The specs, and the pairs that were given up.
    """
    rng = random.Random(seed)
    left = sorted(every_pair())
    rng.shuffle(left)
    missing, given_up = dict.fromkeys(left), set()
    specs: list[Spec] = []
    while missing and (count is None or len(specs) < count):
        pair = next(iter(missing))
        tries = [_containing(pair, rng) for _ in range(TRIES)]
        possible = [spec for spec in tries if is_possible(spec)]
        if not possible:
            del missing[pair]
            given_up.add(pair)
            continue
        best = max(possible, key=lambda spec: sum(p in missing for p in spec.pairs()))
        specs.append(best)
        for found in best.pairs():
            missing.pop(found, None)
    return specs, given_up
