"""The measurement without a GPU: its refusals, its bookkeeping, and its step run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from src.errors import UserError
from src.measure.case import parse_case
from src.measure.cuda import Target, check_measurable, measure, run
from src.measure.cuda_statistics import DeviceBytes, Memory, oom_numbers, own_process
from src.measure.events import Instant
from src.measure.measurement import Measurement, Start, Watch
from src.measure.runner import Conditions, run_case
from src.units import GIB, MIB

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CASE: dict[str, Any] = {
    "model": {"name": "tiny", "config": TINY},
    "seq_len": 16,
    "micro_batch": 2,
    "loop": {"max_grad_norm": 0.0},
}
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 512.50 MiB is free. Including non-PyTorch memory, this process has 78.64 GiB memory in "
    "use. Of the allocated memory 70.25 GiB is allocated by PyTorch, and 7.50 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)


class Scripted:
    """Statistics whose peaks grow by one at every reading; reserved ones are ten times as large."""

    def __init__(self, *, others: int | None = 0) -> None:
        self.readings = 0
        self.resets = 0
        self.others = others

    def reset_peaks(self) -> None:
        self.resets += 1

    def memory(self) -> Memory:
        self.readings += 1
        return Memory(
            allocated_bytes=7,
            reserved_bytes=50,
            peak_allocated_bytes=self.readings,
            peak_reserved_bytes=10 * self.readings,
            num_alloc_retries=2,
        )

    def device(self) -> DeviceBytes:
        return DeviceBytes(num_bytes=450, method="nvml", num_others=self.others)

    def synchronize(self) -> None:
        pass


def rehearse(
    statistics: Scripted | None = None, *, capacity: int | None = None, **changes: Any
) -> Measurement:
    target = Target(
        device=torch.device("cpu"),
        statistics=statistics or Scripted(),
        environment={"gpu": "none", "capacity_bytes": capacity},
    )
    return run(parse_case(CASE | changes), target)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_worker_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "src.measure.worker"],
        input=json.dumps(CASE | {"device": "cuda"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("device=cuda: torch sees no CUDA GPU")
    assert done.stderr.count("\n") == 1
    with pytest.raises(UserError, match="device=cuda"):
        measure(parse_case(CASE | {"device": "cuda"}))


def test_a_measurement_is_not_served_and_writes_no_snapshot() -> None:
    lines = json.dumps(CASE | {"device": "cuda"}) + "\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "src.measure.worker", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines)
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        process.stdin.close()
    assert reply["error"]["key"] == "device"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "ddp+tp", "layout": {"dp": 2, "tp": 2}}, "method"),
        ({"finetune": {"kind": "qlora"}}, "finetune"),
    ],
)
def test_what_only_the_simulated_device_runs_is_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        check_measurable(parse_case(CASE | changes))
    assert caught.value.key == key


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(UserError, match="device=tpu"):
        parse_case(CASE | {"device": "tpu"})


def test_peaks_are_kept_for_every_window_of_the_second_step_and_for_loading() -> None:
    statistics = Scripted()
    watch = Watch(statistics)
    watch.num_blocks = 3
    for step in (1, 2):
        watch.step_begins(step)
        watch.enters(Instant.FORWARD_END)
        watch.reached_block(0)
        watch.enters(Instant.LOSS_BACKWARD)
        for index in (2, 2, 1, 0):
            watch.reached_block(index)
        watch.enters(Instant.GRADIENT_SYNC)
        watch.enters(Instant.OPTIMIZER_STEP)
    watch.close()
    assert list(watch.allocated_peaks.items()) == [
        (Instant.LOAD, 1),
        (Instant.FORWARD_END, 2),
        (Instant.LOSS_BACKWARD, 3),
        (Instant.LAST_BLOCK_BACKWARD, 4),
        (Instant.MIDDLE_BLOCK_BACKWARD, 5),
        (Instant.FIRST_BLOCK_BACKWARD, 6),
        (Instant.GRADIENT_SYNC, 7),
        (Instant.OPTIMIZER_STEP, 8),
    ]
    assert watch.reserved_peaks[Instant.OPTIMIZER_STEP] == 80
    assert statistics.resets > statistics.readings


def test_the_row_has_every_level_and_says_where_they_come_from() -> None:
    row = rehearse().to_json()
    reservation = row["reservation"]
    assert isinstance(reservation, dict)
    assert (row["outcome"], row["source"], row["comm"]) == ("ok", "simulated", "none")
    assert row["peak_instant"] == "optimizer_step"
    assert reservation["outside_bytes"] == 400
    assert reservation["device_bytes"] == reservation["reserved_bytes"] + 400
    assert (reservation["device_bytes_method"], reservation["num_alloc_retries"]) == ("nvml", 2)
    assert isinstance(row["step_seconds"], float)
    assert row["versions"]
    json.dumps(row)


def test_what_was_on_the_gpu_before_the_model_is_told() -> None:
    reservation = rehearse().to_json()["reservation"]
    assert isinstance(reservation, dict)
    assert (reservation["context_bytes"], reservation["communicator_bytes"]) == (450, 0)
    empty = Memory(
        allocated_bytes=0, reserved_bytes=50, peak_allocated_bytes=0, peak_reserved_bytes=0
    )
    bare, connected = (
        DeviceBytes(num_bytes=num_bytes, method="nvml", num_others=0) for num_bytes in (450, 900)
    )
    start = Start(comm="nccl", bare=bare, connected=connected, memory=empty)
    assert start.communicator_bytes == 400


REHEARSING_WORKER = """
import sys
import torch
from src.measure import worker
from src.measure.case import parse_case
from src.measure.cuda import Target, run
sys.path.insert(0, "tests/unit/measure")
from test_cuda import Scripted

def answer(raw):
    target = Target(device=torch.device("cpu"), statistics=Scripted(), environment={})
    return run(parse_case(raw), target).to_json()

worker.answer = answer
sys.exit(worker.main(["--once"]))
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ddp", "layout": {"dp": 2}},
        pytest.param({"method": "fsdp", "layout": {"dp": 2, "shard": 2}}, marks=pytest.mark.slow),
        pytest.param(
            {"method": "tp", "layout": {"tp": 2}, "precision": "fp32"}, marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_find_each_other(changes: dict[str, Any]) -> None:
    conditions = Conditions(
        campaign="test",
        num_gpus=2,
        timeout_s=60.0,
        command=[sys.executable, "-c", REHEARSING_WORKER],
    )
    row = run_case(CASE | changes | {"device": "cuda"}, conditions)
    assert (row.outcome, row.message) == ("ok", None)
    assert (row.comm, len(row.ranks)) == ("gloo", 2)


def test_a_rank_of_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="layout=2: as many GPUs as processes were started"):
        rehearse(method="ddp", layout={"dp": 2})


def test_other_processes_make_a_measurement_invalid() -> None:
    assert rehearse(Scripted(others=1)).outcome == "invalid"
    assert rehearse(Scripted(others=None)).outcome == "ok"


def test_a_card_holds_no_more_than_it_has() -> None:
    """Under Windows' drivers 30 GiB were "allocated" on a card of 16: host memory, lent."""
    reserved = max(rehearse().reserved_peaks.values())
    assert rehearse(capacity=reserved).outcome == "ok"
    assert rehearse(capacity=reserved - 1).outcome == "invalid"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw-fused", "grad_accum": 2},
        {"finetune": {"kind": "lora", "r": 2}, "precision": "bf16-true", "optimizer": "adamw"},
        {"method": "fsdp", "layout": {"dp": 2, "shard": 2}},
        {"method": "fsdp-grad", "layout": {"dp": 4, "shard": 2}, "checkpointing": "none"},
        {"method": "tp", "layout": {"tp": 2}, "precision": "fp32"},
        {"method": "fsdp+tp", "layout": {"dp": 2, "shard": 2, "tp": 2}},
        {"method": "ddp", "layout": {"dp": 2}},
    ],
)
def test_the_step_runs_on_real_tensors(changes: dict[str, Any]) -> None:
    result = rehearse(**changes)
    assert result.outcome == "ok"
    assert set(result.allocated_peaks) == set(Instant)
    assert result.start.comm == ("fake" if "layout" in changes else "none")


def test_running_out_is_an_outcome_with_the_numbers_of_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr("src.measure.training.compute_loss", fail)
    row = rehearse().to_json()
    reservation = row["reservation"]
    assert isinstance(reservation, dict)
    assert (row["outcome"], reservation["oom_instant"]) == ("oom", "forward_end")
    assert reservation["oom_message"] == MESSAGE
    assert reservation["oom_needed_bytes"] == round(78.64 * GIB) + 2 * GIB
    assert row["step_seconds"] is None


def test_the_numbers_of_a_message_are_bytes() -> None:
    assert oom_numbers(MESSAGE) == {
        "tried_bytes": 2 * GIB,
        "capacity_bytes": round(79.15 * GIB),
        "free_bytes": round(512.5 * MIB),
        "process_bytes": round(78.64 * GIB),
        "allocated_bytes": round(70.25 * GIB),
        "unallocated_bytes": round(7.5 * GIB),
    }
    assert oom_numbers("out of memory") == {}


def test_a_process_that_nvml_hides_has_no_bytes() -> None:
    assert own_process({1: 100, 2: 50}, pid=1) == DeviceBytes(
        num_bytes=100, method="nvml", num_others=1
    )
    assert own_process({2: 50}, pid=1) is None
    assert own_process({1: None}, pid=1) is None
