"""The formula against the dry run over families and settings: `python -m tests.matrix`.

Draws specs with a fixed seed (every model of `MODELS` equally often; of several random settings the
one that brings most pairs of values not seen yet), asks both for the peak of allocated bytes of
each, prints the specs that are furthest apart, and writes the tables into docs/accuracy.md.
Models are cut to a few blocks, of their full width.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from src.architecture import describe
from src.config.zoo import load
from src.errors import UserError
from src.measure.case import Case, parse_case
from src.measure.dry_run import dry_run
from src.memory import Instant, estimate_step, implementation
from src.plan.layouts import tensor_parallel_degrees
from src.spec import Cluster, Gpu
from tests.transformers_models import with_layers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- formula against dry run: begin -->", "<!-- formula against dry run: end -->"
TITLE = "# How accurate the numbers are"
SEED = 20240314
BLOCKS = 4
TRIES = 30
SHOWN_ABOVE = 0.02

MODELS = (
    "opt-1.3b", "opt-350m", "bloom-560m", "codegen-350m", "biogpt", "gpt_bigcode-santacoder",
    "gpt-neo-125m", "gpt-j-6b", "pythia-410m", "stablelm-base-alpha-3b", "gpt2-medium",
    "llama-3.2-1b", "llama-2-7b", "tinyllama-1.1b", "mistral-7b-v0.1", "mixtral-8x7b",
    "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma-2b", "gemma-2-2b", "gemma-3-1b",
    "phi-1_5", "phi-3-mini", "falcon-7b", "starcoder2-3b", "olmo-2-1b", "powerlm-3b",
    "bert-base-uncased", "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip
LAYOUTS: dict[str, dict[str, int]] = {
    "single": {},
    "ddp": {"dp": 4},
    "fsdp": {"dp": 4, "shard": 4},
    "fsdp-grad": {"dp": 4, "shard": 4},
    "tp": {"tp": 2},
    "ddp+tp": {"dp": 2, "tp": 2},
    "fsdp+tp": {"dp": 2, "tp": 2, "shard": 2},
}
AXES: dict[str, tuple[Any, ...]] = {
    "method": tuple(LAYOUTS),
    "finetune": ("full", "lora"),
    "precision": ("bf16-mixed", "bf16-true", "fp16-mixed", "fp32"),
    "optimizer": ("adamw", "adamw-fused", "sgd", "sgd-momentum"),
    "checkpointing": ("full", "none"),
    "attention": ("sdpa", "eager", "flash"),
    "gpu": ("a100-80gb", "v100-32gb", "h100-80gb"),
    "grad_accum": (1, 2),
    "shape": ((1, 512), (4, 512), (8, 256), (2, 1024)),
}
"""`shape` is (micro batch, sequence); 512 fits the models with the shortest tables of positions."""

Setting = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model under one setting."""

    model: str
    setting: Setting

    def __str__(self) -> str:
        batch, seq_len = self.setting["shape"]
        rest = [f"{key}={value}" for key, value in self.setting.items() if key != "shape"]
        return " ".join([self.model, *rest, f"micro_batch={batch}", f"seq_len={seq_len}"])

    def case(self, *, blocks: int = BLOCKS) -> Case:
        """The spec as the dry run takes it."""
        setting, entry = self.setting, load("model", self.model)
        config = with_layers(entry["config"], blocks)
        if "attention_types" in config:
            config["attention_types"] = [[["global", "local"], blocks // 2]]
        batch, seq_len = setting["shape"]
        table = load("gpu", setting["gpu"])
        gpu = {field.name: table[field.name] for field in fields(Gpu)}
        plain = ("method", "precision", "optimizer", "checkpointing", "attention", "grad_accum")
        return parse_case(
            {
                "model": {"name": self.model, "config": config},
                "finetune": {"kind": setting["finetune"]},
                "layout": LAYOUTS[setting["method"]],
                "micro_batch": batch,
                "seq_len": seq_len,
                "gpu": gpu,
                **{key: setting[key] for key in plain},
            }
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both answers to one spec, at the level allocated."""

    spec: Spec
    formula_bytes: int
    dry_bytes: int
    formula_instant: str
    dry_instant: str
    instants: dict[str, tuple[int, int]]

    @property
    def error(self) -> float:
        """(formula - dry run) / dry run."""
        return self.formula_bytes / self.dry_bytes - 1

    @property
    def same_instant(self) -> bool:
        """Whether both peak at the same instant; only the dry run has one between the blocks."""
        if self.dry_instant == "middle_block_backward":
            return self.formula_instant.endswith("block_backward")
        return self.formula_instant == self.dry_instant


def is_possible(spec: Spec) -> bool:
    """Whether both can answer."""
    setting = spec.setting
    try:
        case = spec.case()
        decoder = describe(case.step.job.model)
        if implementation(decoder, case.step.job) is not case.step.job.attention:
            return False
        limit = decoder.max_positions
        if limit is not None and setting["shape"][1] > limit:
            return False
        if "tp" in setting["method"]:
            cluster = Cluster(gpu=case.step.gpu, num_gpus=4, gpus_per_node=8)
            if setting["finetune"] == "lora" or 2 not in tensor_parallel_degrees(decoder, cluster):
                return False
        estimate_step(case.step)
    except UserError:
        return False
    return True


def _pairs(setting: Setting) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(sorted(setting.items()), 2))


def draw(count: int, *, seed: int = SEED) -> list[Spec]:
    """`count` specs; the same ones for a seed."""
    rng = random.Random(seed)
    seen: set[tuple[tuple[str, Any], ...]] = set()
    specs: list[Spec] = []
    while len(specs) < count:
        model = MODELS[len(specs) % len(MODELS)]
        tries = [
            Spec(model=model, setting={key: rng.choice(values) for key, values in AXES.items()})
            for _ in range(TRIES)
        ]
        possible = [spec for spec in tries if is_possible(spec)]
        assert possible, f"{model}: none of {TRIES} settings is possible"
        best = max(possible, key=lambda spec: len(_pairs(spec.setting) - seen))
        seen |= _pairs(best.setting)
        specs.append(best)
    return specs


def compare(spec: Spec, *, blocks: int = BLOCKS) -> Comparison:
    """Both answers.

    Raises:
        UserError: the dry run cannot simulate the model.
    """
    case = spec.case(blocks=blocks)
    found, truth = estimate_step(case.step), dry_run(case)
    totals = {instant.value: sum(cells.values()) for instant, cells in found.ledger.items()}
    simulated = {instant.value: peak for instant, peak in truth.instant_peaks.items()}
    step = [instant.value for instant in Instant if instant is not Instant.LOAD]
    return Comparison(
        spec=spec,
        formula_bytes=found.peak_bytes.allocated,
        dry_bytes=truth.peak_bytes,
        formula_instant=found.peak_instant.value,
        dry_instant=truth.peak_instant.value,
        instants={key: (totals.get(key, 0), simulated.get(key, 0)) for key in step},
    )


def percentile(errors: Sequence[float], share: float) -> float:
    """The smallest error that `share` of the errors do not exceed."""
    return sorted(errors)[max(0, -(-round(len(errors) * share * 1000) // 1000) - 1)]


def _row(label: str, rows: Sequence[Comparison]) -> str:
    errors = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    same = sum(row.same_instant for row in rows)
    median = statistics.median(errors)
    return f"| {label} | {len(rows)} | {median:.2%} | {worst:+.2%} | {same} |"


def _table(
    name: str, rows: Sequence[Comparison], label: Callable[[Comparison], str], order: Iterable[str]
) -> list[str]:
    head = [f"| {name} | specs | median | worst | same instant |", "|---|---|---|---|---|"]
    groups = {key: [row for row in rows if label(row) == key] for key in order}
    return [*head, *(_row(key, mine) for key, mine in groups.items() if mine)]


def _is_far(row: Comparison) -> bool:
    return abs(row.error) > SHOWN_ABOVE


def _model_type(row: Comparison) -> str:
    return str(load("model", row.spec.model)["config"]["model_type"])


def markdown(
    rows: Sequence[Comparison], *, command: str, blocks: int, failed: Sequence[str] = ()
) -> str:
    """The section of docs/accuracy.md."""
    errors = [abs(row.error) for row in rows]
    same = sum(row.same_instant for row in rows)
    lines = [
        "## Formula against the dry run",
        "",
        f"`{command}`: {len(rows)} specs over {len({row.spec.model for row in rows})} models of "
        f"{len({_model_type(row) for row in rows})} families, each model cut to {blocks} blocks of",
        "its full width; settings drawn with a fixed seed so that pairs of values meet. Error: "
        "(formula - dry run) / dry run,",
        "of the step's peak, level allocated. The dry run is a simulation, not a measurement.",
        "",
        f"Median {statistics.median(errors):.2%}, 95th percentile {percentile(errors, 0.95):.2%}, "
        f"worst {max((row.error for row in rows), key=abs):+.2%}; the same instant in {same} of "
        f"{len(rows)}.",
        "",
        *_table("family", rows, _model_type, sorted({_model_type(row) for row in rows})),
    ]
    for axis, values in AXES.items():

        def label(row: Comparison, axis: str = axis) -> str:
            return str(row.spec.setting[axis])

        heading = "micro batch, sequence" if axis == "shape" else axis
        lines += ["", *_table(heading, rows, label, map(str, values))]
    far = sorted((row for row in rows if _is_far(row)), key=lambda row: -abs(row.error))
    lines += ["", f"Specs that are off by more than {SHOWN_ABOVE:.0%}: {len(far) or 'none'}."]
    if far:
        lines += ["", "| spec | error | formula's instant | dry run's |", "|---|---|---|---|"]
        lines += [
            f"| {row.spec} | {row.error:+.2%} | {row.formula_instant} | {row.dry_instant} |"
            for row in far
        ]
    if failed:
        lines += ["", f"Not counted, as the dry run cannot simulate them: {len(failed)}.", ""]
        lines += [f"- {line}" for line in failed]
    return "\n".join(lines) + "\n"


def write_section(section: str, page: Path = PAGE) -> None:
    """Put the section into the page, in the place of an earlier one."""
    text = page.read_text("utf-8") if page.exists() else f"{TITLE}\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.parent.mkdir(exist_ok=True)
    page.write_text(f"{head}{BEGIN}\n{section}{END}{tail}", "utf-8")


def difference(row: Comparison) -> str:
    """Both answers by instant, for a spec that is off."""
    lines = [f"{row.error:+7.2%}  {row.spec}"]
    lines += [
        f"    {instant:<22}{formula:>16,}{dry:>16,}{formula - dry:>+16,}"
        for instant, (formula, dry) in row.instants.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--specs", type=int, default=124, help="how many [124]")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of each model [{BLOCKS}]")
    parser.add_argument("--no-write", action="store_true", help="leave docs/accuracy.md alone")
    options = parser.parse_args(arguments)
    rows: list[Comparison] = []
    failed: list[str] = []
    for number, spec in enumerate(draw(options.specs, seed=options.seed), start=1):
        began = time.perf_counter()
        try:
            rows.append(compare(spec, blocks=options.blocks))
            word = f"{rows[-1].error:+.2%}"
        except (UserError, AssertionError) as error:
            word = " ".join(str(error).split())[-200:]
            failed.append(f"{spec}: {word}")
        seconds = time.perf_counter() - began
        print(f"{number}/{options.specs} {seconds:.1f} s {word} {spec}", file=sys.stderr)
    given = "".join(
        f" --{name} {getattr(options, name)}"
        for name in ("specs", "seed", "blocks")
        if getattr(options, name) != parser.get_default(name)
    )
    command = f"python -m tests.matrix{given}"
    section = markdown(rows, command=command, blocks=options.blocks, failed=failed)
    print(section)
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        if _is_far(row):
            print(difference(row))
    if not options.no_write:
        write_section(section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
