"""The measurement on a real GPU, held against the dry run of the same case."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SMALL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
TOLERANCE = 0.02


def ask(**changes: Any) -> dict[str, Any]:
    case = {"model": {"name": "small", "config": SMALL}, "seq_len": 512, "micro_batch": 4}
    done = subprocess.run(
        [sys.executable, "-m", "src.measure.worker"],
        input=json.dumps(case | changes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def this_gpu() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    return {
        "compute_capability": [found.major, found.minor],
        "usable_gib": found.total_memory / 2**30,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "fp32", "checkpointing": "none"},
        {"optimizer": "adamw", "grad_accum": 2},
        {"finetune": {"kind": "lora"}, "precision": "bf16-true"},
        {"method": "fsdp", "layout": {"dp": 4, "shard": 4}},
        {"method": "ddp", "layout": {"dp": 2}},
        {"method": "tp", "layout": {"tp": 2}},
    ],
)
def test_the_dry_run_agrees_with_the_gpu(changes: dict[str, Any]) -> None:
    measured = ask(device="cuda", **changes)
    simulated = ask(gpu=this_gpu(), **changes)
    assert (measured["source"], simulated["source"]) == ("measured", "simulated")
    assert simulated["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=TOLERANCE)
    for instant, peak in measured["instant_peaks"].items():
        if instant != "load":
            assert simulated["instant_peaks"][instant] == pytest.approx(peak, rel=0.1), instant


def test_a_step_that_does_not_fit_is_a_row() -> None:
    capacity = torch.cuda.get_device_properties(0).total_memory
    row = ask(device="cuda", micro_batch=capacity // (512 * 32000 * 2), checkpointing="none")
    assert row["outcome"] == "oom"
    assert row["reservation"]["oom_numbers"]["tried_bytes"] > 0
    assert row["reservation"]["num_ooms"] >= 1
