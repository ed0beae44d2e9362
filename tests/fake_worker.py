"""A worker whose answers a test decides: `python -m tests.fake_worker MODE`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from src.errors import UserError
from src.measure import worker

GIB = 2**30


def row(micro_batch: int = 1, **more: Any) -> dict[str, Any]:
    """The worker's row of a case that went well."""
    return {
        "outcome": "ok",
        "source": "simulated",
        "peak_bytes": micro_batch * GIB,
        "peak_instant": "forward_end",
        "instant_peaks": {"forward_end": micro_batch * GIB, "load": GIB},
        "instant_reserved_peaks": {"forward_end": 2 * micro_batch * GIB},
        "after_step_bytes": GIB,
        "step_seconds": None,
        "reservation": {
            "reserved_bytes": 2 * micro_batch * GIB,
            "outside_bytes": GIB,
            "device_bytes": 2 * micro_batch * GIB + GIB,
            "num_alloc_retries": 0,
            "oom_instant": None,
            "oom_message": None,
            "oom_numbers": None,
        },
        "environment": {"gpu": "none"},
        "versions": {"torch": "0"},
        "notes": [],
        "num_parameters": 5,
        **more,
    }


def out_of_memory(micro_batch: int) -> dict[str, Any]:
    """The same of one that did not fit."""
    more = {"oom_instant": "forward_end", "oom_message": "CUDA out of memory.", "num_ooms": 1}
    return row(micro_batch, outcome="oom", reservation=row()["reservation"] | more)


def answer(raw: Any) -> dict[str, Any]:
    """What the mode says; `rank` modes differ by RANK."""
    mode, micro_batch = sys.argv[1], raw["micro_batch"]
    rank = int(os.environ.get("RANK", "0"))
    if mode == "rank-oom":
        mode = "oom" if rank == 1 else "hang"
    if mode == "rank-ok":
        return row(micro_batch + rank, comm="nccl", notes=[os.environ["WORLD_SIZE"]])
    if mode.startswith("sleep:"):
        time.sleep(float(mode.removeprefix("sleep:")))
    if mode == "hang":
        while True:
            signal.pause()
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "refuse":
        raise UserError(key="model_type", value="nope", allowed="unknown")
    if mode == "garble":
        return {"outcome": "splendid"}
    if mode == "invalid":
        return row(micro_batch, outcome="invalid")
    return out_of_memory(micro_batch) if mode == "oom" else row(micro_batch)


if __name__ == "__main__":
    worker.answer = answer
    sys.exit(worker.main(["--once"]))
