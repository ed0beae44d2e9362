"""`python -m src.measure.worker`: one JSON case on stdin, one JSON row on stdout.

Case (every key but `model` has a default; unknown keys are refused):

    {"model": {"name": "opt-1.3b", "hf_id": null, "config": {"model_type": "opt", ...}},
     "finetune": {"kind": "full|lora|qlora", "r": 16, "alpha": 32, "dropout": 0.0,
                  "targets": ["q_proj"], "quantization": "nf4|int8", "double_quant": true,
                  "upcast": "all|norms|none"},
     "seq_len": 512, "micro_batch": 1, "grad_accum": 1,
     "precision": "bf16-mixed|bf16-true|fp16-mixed|fp32",
     "optimizer": "adamw|adamw-fused|sgd|sgd-momentum",
     "checkpointing": "full|none", "attention": "flash|sdpa|eager", "loss": "standard",
     "method": "single|ddp|fsdp|fsdp-grad|tp|ddp+tp|fsdp+tp",
     "layout": {"dp": 1, "tp": 1, "shard": 1},
     "device": "simulated|cuda",
     "gpu": {"sku": "a100-80gb", "compute_capability": [8, 0], "usable_gib": 79.25, ...},
     "loop": {"max_grad_norm": 1.0, "reentrant_checkpointing": false, "hold_outputs": false, ...}}

`gpu` holds fields of `src.spec.Gpu` that differ from an A100-80GB; `loop` fields of `LoopOptions`.
FSDP needs `layout.shard` (a divisor of `dp`; fewer than `dp`: hybrid sharding). Two more keys ask
for more than the row: `snapshot`, a file to write for PyTorch's memory viewer, and `timeline`,
true for live bytes by owner over the second step under the row's key `timeline`.

Row: `DryRunResult.to_json()`. `outcome` ("ok", or "oom": the step does not fit on the GPU; the
bytes are still those that it needs), `source` (always "simulated"), `level`, `peak_bytes`,
`peak_instant`, `instant_peaks`, `ledger` (instant -> owner -> bytes), `after_step_bytes`,
`num_events`, `versions`, `reservation` (`reserved_bytes`, `device_bytes`, `oom_message`, ...),
`notes`, `num_parameters`, `num_trainable_parameters`. Exit 0. Wrong input, or a model whose code
cannot be simulated: one line on stderr, exit 1.

`device=cuda` measures the same step on the first visible GPU, or as one rank of torchrun's on its
GPU (`gpu` is not used), and gives `Measurement.to_json()`: the same keys but `ledger` and
`num_events`, and `comm`, `step_seconds`, `instant_reserved_peaks`, `environment`. Without a CUDA
GPU: one line, exit 1.

`--serve`: a case a line until stdin ends; a line `{"row": ...}` or `{"error": {"key", "value",
"allowed"}}` for each. Whatever else a library prints goes to stderr. `--once`: the same for one
case, and it may be a measurement. `--gpus`: the GPUs that torch sees, in the same form.

`--run-many CASES.jsonl --rows ROWS.jsonl`: every case of the first file in a process of its own,
appended to the second as a row of `src.record`; `--help` after it tells the rest. It needs nothing
but Python, torch and transformers, and goes on where an earlier run stopped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from src.errors import UserError
from src.measure.case import Case, parse_case
from src.measure.collector import uncollected

if TYPE_CHECKING:
    from src.measure.result import DryRunResult

_KEPT_RESULTS = 8
"""Results that are kept, so that a snapshot of what was just run costs no second run."""


def answer(raw: object) -> dict[str, Any]:
    """The row of a case, with the snapshot written and the timeline added where asked for.

    Raises:
        UserError: the case is wrong or cannot be simulated, or the snapshot cannot be written.
    """
    case_keys = dict(raw) if isinstance(raw, dict) else raw
    snapshot = timeline = None
    if isinstance(case_keys, dict):
        snapshot, timeline = case_keys.pop("snapshot", None), case_keys.pop("timeline", None)
    if isinstance(case_keys, dict) and case_keys.get("device", "simulated") != "simulated":
        return _measure(case_keys, wants_trace=snapshot is not None or bool(timeline))
    case, result = _simulate(json.dumps(case_keys, sort_keys=True))
    row = result.to_json()
    if snapshot is not None:
        _write_snapshot(Path(str(snapshot)), case, result)
    if timeline:
        from src.measure.timeline import timeline as timeline_of

        row["timeline"] = timeline_of(result.events, step=result.measured_step).to_json()
    return row


def _measure(raw: object, *, wants_trace: bool) -> dict[str, Any]:
    """The row of a measurement on this machine's GPU."""
    case = parse_case(raw)
    if wants_trace:
        raise UserError(
            key="device", value=case.device, allowed="simulated, with snapshot or timeline"
        )
    from src.measure.cuda import measure

    return measure(case).to_json()


@lru_cache(maxsize=_KEPT_RESULTS)
def _simulate(text: str) -> tuple[Case, DryRunResult]:
    case = parse_case(json.loads(text))
    with uncollected():
        from src.measure.dry_run import dry_run

        return case, dry_run(case)


def _write_snapshot(path: Path, case: Case, result: DryRunResult) -> None:
    from src.measure.timeline import write_trace

    assert result.reservation is not None
    write_trace(
        path,
        result.events,
        capacity_bytes=case.step.gpu.usable_bytes,
        outside_bytes=result.reservation.outside_bytes,
    )


def serve(lines: Iterable[str], respond: Callable[[str], Any]) -> int:
    """Answer line by line; ends with stdin, even in the middle of an answer."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as channel:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in lines:
            try:
                reply: dict[str, Any] = {"row": respond(line)}
            except UserError as error:
                words = {"key": error.key, "value": str(error.value), "allowed": error.allowed}
                reply = {"error": words}
            channel.write(json.dumps(reply) + "\n")
            channel.flush()
    return 0


def _gpus(_line: str) -> object:
    from src.measure.cuda import visible_gpus

    return visible_gpus()


def _simulated(raw: Any) -> object:
    """`raw`, unless it asks for a measurement: that needs a process of its own."""
    if isinstance(raw, dict) and raw.get("device", "simulated") != "simulated":
        raise UserError(key="device", value=raw["device"], allowed="simulated, with --serve")
    return raw


def _lines() -> Iterator[str]:
    """Lines of stdin; the process ends as soon as nobody holds its other end any more."""
    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            queue.put(line)
        os._exit(0)

    Thread(target=read, daemon=True).start()
    while True:
        yield queue.get()


def main(arguments: list[str]) -> int:
    """Answer the case on stdin; the exit code."""
    if arguments == ["--serve"]:
        return serve(_lines(), lambda line: answer(_simulated(json.loads(line))))
    if arguments == ["--once"]:
        return serve(islice(_lines(), 1), lambda line: answer(json.loads(line)))
    if arguments == ["--gpus"]:
        return serve([""], _gpus)
    if arguments[:1] == ["--run-many"]:
        from src.measure.run_many import run_many

        return run_many(arguments)
    try:
        try:
            raw = json.load(sys.stdin)
        except json.JSONDecodeError as error:
            raise UserError(key="stdin", value="...", allowed=f"a JSON case ({error})") from error
        row = answer(raw)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
