"""`python -m src.measure.worker`: one JSON case on stdin, one JSON row on stdout.

Case (every key but `model` has a default; unknown keys are refused):

    {"model": {"name": "opt-1.3b", "hf_id": null, "config": {"model_type": "opt", ...}},
     "finetune": {"kind": "full|lora", "r": 16, "alpha": 32, "dropout": 0.0, "targets": ["q_proj"]},
     "seq_len": 512, "micro_batch": 1, "grad_accum": 1,
     "precision": "bf16-mixed|bf16-true|fp16-mixed|fp32",
     "optimizer": "adamw|adamw-fused|sgd|sgd-momentum",
     "checkpointing": "full|none", "attention": "flash|sdpa|eager", "loss": "standard",
     "method": "single|ddp|fsdp|fsdp-grad|tp|ddp+tp|fsdp+tp",
     "layout": {"dp": 1, "tp": 1, "shard": 1},
     "gpu": {"sku": "a100-80gb", "compute_capability": [8, 0], "usable_gib": 79.25, ...},
     "loop": {"max_grad_norm": 1.0, "reentrant_checkpointing": false, "hold_outputs": false, ...}}

`gpu` holds fields of `src.spec.Gpu` that differ from an A100-80GB; `loop` fields of `LoopOptions`.
FSDP needs `layout.shard` (a divisor of `dp`; fewer than `dp`: hybrid sharding).

Row: `DryRunResult.to_json()`. `outcome` ("ok", or "oom": the step does not fit on the GPU; the
bytes are still those that it needs), `source` (always "simulated"), `level`, `peak_bytes`,
`peak_instant`, `instant_peaks`, `ledger` (instant -> owner -> bytes), `after_step_bytes`,
`num_events`, `versions`, `reservation` (`reserved_bytes`, `device_bytes`, `oom_message`, ...),
`notes`. Exit 0. Wrong input, or a model whose code cannot be simulated: one line on stderr, exit 1.
"""

from __future__ import annotations

import json
import sys

from src.errors import UserError
from src.measure.case import parse_case


def main() -> int:
    """Answer the case on stdin; the exit code."""
    try:
        try:
            raw = json.load(sys.stdin)
        except json.JSONDecodeError as error:
            raise UserError(key="stdin", value="...", allowed=f"a JSON case ({error})") from error
        case = parse_case(raw)
        from src.measure.dry_run import dry_run

        row = dry_run(case).to_json()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
