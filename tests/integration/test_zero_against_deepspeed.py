"""The formula's ZeRO columns against DeepSpeed's own engine, storage by storage.

`tests/zero_engine.py` runs the engine of an installed DeepSpeed on fake tensors. Name a Python that
has deepspeed 0.19.8 beside torch, transformers and peft in PEAKCAST_DEEPSPEED_PYTHON, then
`pytest -m slow tests/integration/test_zero_against_deepspeed.py` writes `docs/zero-accuracy.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from src.config.zoo import load
from src.measure.case import Case, parse_case
from src.memory import Estimate, Instant, estimate_step
from src.memory.parts import parts_of
from src.memory.placement.partitions import pinned_bytes
from src.memory.placement.zero import ZeroPlacement
from src.spec import Method, Offload
from tests import zero_engine
from tests.transformers_models import with_layers

PAGE = Path(__file__).parents[2] / "docs" / "zero-accuracy.md"
PYTHON = os.environ.get("PEAKCAST_DEEPSPEED_PYTHON")
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
STAGES = ("zero1", "zero2", "zero3")
SMALL_BUCKET = {"zero": {"reduce_bucket_size": 50_000_000}}
FP32_GRADIENTS = {"zero": {"fp32_gradients": True}}
NO_LIVE = {"zero": {"max_live_parameters": 0, "prefetch_bucket_size": 0}}
WINDOWS = {
    "forward": ("forward_end",),
    "loss": ("loss_backward",),
    "blocks": ("last_block_backward", "middle_block_backward", "first_block_backward"),
    "sync": ("gradient_sync",),
    "step": ("optimizer_step",),
}
"""Where the engine's windows and the formula's instants are compared: the largest of each."""

SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "1 GPU": {"gpus": 1},
    "2 GPUs": {"gpus": 2},
    "64 GPUs": {"gpus": 64},
    "grad_accum=2": {"grad_accum": 2},
    "fp16-mixed": {"precision": "fp16-mixed"},
    "fp32": {"precision": "fp32"},
    "lora": {"finetune": {"kind": "lora"}},
    "checkpointing=none": {"checkpointing": "none"},
    "adamw-fused": {"optimizer": "adamw-fused"},
    "adamw-loop": {"optimizer": "adamw-loop"},
    "sgd": {"optimizer": "sgd"},
    "one parameter group": {"loop": {"trainer_groups": False}},
    "reduce_bucket_size=5e7": SMALL_BUCKET,
    "fp32_gradients": FP32_GRADIENTS,
    "fp32_reduce": {"fp32_reduce": True},
    "offload=optimizer": {"offload": "optimizer"},
    "offload=optimizer grad_accum=2": {"offload": "optimizer", "grad_accum": 2},
}
OTHER_MODELS = ("opt-350m", "gpt2-medium", "qwen3-0.6b")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One case of one stage.

    Attributes:
        label: what differs from the usual.
        raw: the case as JSON.
    """

    label: str
    raw: dict[str, Any]

    @property
    def case(self) -> Case:
        return parse_case(self.raw)

    @property
    def line(self) -> str:
        """The case for the engine, on the rank whose run of the partition keeps most."""
        return json.dumps({**self.raw, "rank": fullest_rank(self.case)})


def raw_case(model: str, method: str, *, gpus: int = 4, blocks: int = 4, **keys: Any) -> Any:
    config = with_layers(load("model", model)["config"], blocks)
    return {
        "model": {"name": model, "config": config},
        "micro_batch": 1,
        "seq_len": 512,
        "precision": "bf16-mixed",
        "optimizer": "adamw",
        "method": method,
        "layout": {"dp": gpus, "shard": gpus},
        **keys,
    }


def runs() -> Iterator[Run]:
    for method in STAGES:
        for name, keys in SETTINGS.items():
            raw = raw_case("llama-3.2-1b", method, **keys)
            yield Run(label=f"llama-3.2-1b {method} {name}".strip(), raw=raw)
        for model in OTHER_MODELS:
            yield Run(label=f"{model} {method}", raw=raw_case(model, method))
    for name, model, keys in (
        ("offload=all", "llama-3.2-1b", {"offload": "all"}),
        ("offload=all grad_accum=2", "llama-3.2-1b", {"offload": "all", "grad_accum": 2}),
        ("max_live_parameters=0", "llama-3.2-1b", NO_LIVE),
        ("16 blocks", "llama-3.2-1b", {"blocks": 16}),
        ("16 blocks", "llama-2-7b", {"blocks": 16}),
    ):
        yield Run(label=f"{model} zero3 {name}", raw=raw_case(model, "zero3", **keys))
    raw = raw_case("llama-2-7b", "zero2", blocks=12)
    yield Run(label="llama-2-7b zero2 12 blocks", raw=raw)


def placement_of(case: Case) -> ZeroPlacement:
    step = case.step
    placement = parts_of(step.job, step.method, step.layout, step.gpu).placement
    assert isinstance(placement, ZeroPlacement)
    return placement


def fullest_rank(case: Case) -> int:
    """Stage 3 gives every rank the same."""
    if case.step.method is Method.ZERO3:
        return 0
    shares = placement_of(case).shares
    return max(range(len(shares)), key=lambda rank: shares[rank].whole)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Formula and engine of one run, in bytes by window.

    Attributes:
        label: of the run.
        formula: largest by window.
        engine: the same.
        host: (formula, engine) bytes of host memory.
    """

    label: str
    formula: dict[str, int]
    engine: dict[str, int]
    host: tuple[int, int]

    @property
    def peaks(self) -> tuple[int, int]:
        return max(self.formula.values()), max(self.engine.values())

    @property
    def error(self) -> float:
        mine, theirs = self.peaks
        return mine / theirs - 1

    @property
    def instants(self) -> tuple[str, str]:
        formula, engine = self.formula, self.engine
        return max(formula, key=lambda key: formula[key]), max(engine, key=lambda key: engine[key])

    @property
    def host_error(self) -> float:
        mine, theirs = self.host
        return mine / theirs - 1 if theirs else float(mine > 0)


def compared(run: Run, answer: dict[str, Any]) -> Compared:
    assert "error" not in answer, answer["error"]
    case = run.case
    found = estimate_step(case.step)
    return Compared(
        label=run.label,
        formula=by_window(formula_peaks(found)),
        engine=by_window(answer["instant_peaks"]),
        host=(found.host_bytes, engine_host_bytes(case, answer)),
    )


def formula_peaks(found: Estimate) -> dict[str, int]:
    return {instant.value: sum(cells.values()) for instant, cells in found.ledger.items()}


def by_window(peaks: dict[str, int]) -> dict[str, int]:
    return {
        window: max(peaks.get(instant, 0) for instant in instants)
        for window, instants in WINDOWS.items()
    }


def engine_host_bytes(case: Case, answer: dict[str, Any]) -> int:
    """What its tensors take, page-locked ones rounded up.

    On a CPU the engine copies the fp32 partition into half-precision weights directly; towards a
    GPU PyTorch casts on the host first (`copy_kernel_cuda`).
    """
    if case.step.job.offload is Offload.NONE:
        return 0
    pinned = answer["host_pinned"]
    total = max(answer["host_peaks"].values()) - sum(pinned)
    total += sum(int(pinned_bytes(size)) for size in pinned)
    if case.step.method is Method.ZERO3 and case.step.job.offload is Offload.OPTIMIZER:
        total += placement_of(case).model_bytes * placement_of(case).partition
    return total


def answers(cases: list[Run]) -> list[dict[str, Any]]:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-m", "tests.zero_engine"],
        input="".join(run.line + "\n" for run in cases),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def page(rows: list[Compared]) -> str:
    errors = [abs(row.error) for row in rows]
    same = sum(row.instants[0] == row.instants[1] for row in rows)
    hosts = [row for row in rows if row.host[1]]
    lines = [
        "# ZeRO: the formula against DeepSpeed's engine",
        "",
        "DeepSpeed 0.19.8's own engine, run by `tests/zero_engine.py` on fake tensors and CUDA's",
        "kernels, every storage followed on GPU and host; no GPU and no network is involved. Peaks",
        "of allocated bytes of a step like all that follow, on the rank whose run keeps most,",
        "micro batch 1 and 512 tokens, models cut to four blocks where no number is given. Usual:",
        "bf16, foreach AdamW, full checkpointing, 4 GPUs, the Trainer's two parameter groups and",
        "DeepSpeed's buffer sizes. Written by",
        "`pytest -m slow tests/integration/test_zero_against_deepspeed.py`.",
        "",
        f"{len(rows)} cases: median error {statistics.median(errors):.2%}, worst "
        f"{max(rows, key=lambda row: abs(row.error)).error:+.2%}; the same window in {same}. "
        f"Host memory in {len(hosts)}: worst "
        f"{max(hosts, key=lambda row: abs(row.host_error)).host_error:+.2%}.",
        "",
        "The last columns are the formula's bytes less the engine's, in MB, by window of the step;",
        "blocks: the largest of all blocks' backward passes.",
        "",
        "| case | formula MB | engine MB | error | window | " + " | ".join(WINDOWS) + " | host |",
        "|---|---|---|---|---|" + "---|" * (len(WINDOWS) + 1),
    ]
    for row in rows:
        mine, theirs = row.peaks
        differences = (f"{(row.formula[key] - row.engine[key]) / 1e6:+.0f}" for key in WINDOWS)
        host = f"{row.host[0] / 1e6:.0f} / {row.host[1] / 1e6:.0f}" if row.host[1] else ""
        lines.append(
            f"| {row.label} | {mine / 1e6:.0f} | {theirs / 1e6:.0f} | {row.error:+.2%} | "
            f"{row.instants[1]} | " + " | ".join(differences) + f" | {host} |"
        )
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="PEAKCAST_DEEPSPEED_PYTHON names no interpreter")
def test_the_engine_s_bytes_are_those_of_the_formula() -> None:
    cases = list(runs())
    rows = [compared(*pair) for pair in zip(cases, answers(cases), strict=True)]
    PAGE.write_text(page(rows), encoding="utf-8")
    assert statistics.median(abs(row.error) for row in rows) <= 0.002
    assert max(abs(row.error) for row in rows) <= 0.03
    assert sum(row.instants[0] == row.instants[1] for row in rows) >= 0.9 * len(rows)
    assert max(abs(row.host_error) for row in rows) <= 0.005


def test_every_stage_and_setting_is_compared() -> None:
    cases = list(runs())
    assert len({run.label for run in cases}) == len(cases) > 60
    for run in cases:
        stage = zero_engine.config_of(run.case)["zero_optimization"]["stage"]
        assert run.case.step.method.value == f"zero{stage}"
        peaks = by_window(formula_peaks(estimate_step(run.case.step)))
        assert min(peaks.values()) > 0
    assert set(WINDOWS["blocks"]) > {
        Instant.LAST_BLOCK_BACKWARD.value,
        Instant.FIRST_BLOCK_BACKWARD.value,
    }
