"""The dry run's client against children that behave well and badly."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from src.errors import NotCoveredError, UserError
from src.measure.case import A100_80GB, Case, parse_case
from src.measure.client import DryRun, case_of, read_row
from src.spec import (
    Attention,
    Finetune,
    FinetuneKind,
    Job,
    Layout,
    Method,
    Model,
    Optimizer,
    Precision,
    Step,
)
from src.units import GIB, MIB

ROW: dict[str, Any] = {
    "outcome": "ok",
    "peak_bytes": 10 * GIB,
    "peak_instant": "loss_backward",
    "ledger": {"load": {"weights": GIB}, "loss_backward": {"weights": GIB, "logits": 9 * GIB}},
    "versions": {"torch": "2.0", "transformers": "5.0"},
    "reservation": {
        "reserved_bytes": 12 * GIB,
        "outside_bytes": 512 * MIB,
        "oom_instant": None,
        "oom_message": None,
        "oom_needed_bytes": None,
    },
    "notes": ["something assumed"],
    "num_parameters": 100,
    "num_trainable_parameters": 10,
}
ANSWERS = f"""
import json, sys
row = json.loads({json.dumps(ROW)!r})
for line in sys.stdin:
    case = json.loads(line)
    row["peak_bytes"] += case["micro_batch"]
    print(json.dumps({{"row": row}}), flush=True)
"""


def make_step(micro_batch: int = 1, method: Method = Method.FSDP, **job: Any) -> Step:
    model = Model(name="tiny", hf_id=None, config={"model_type": "gpt2", "n_layer": 2})
    layout = Layout() if method is Method.SINGLE else Layout(dp=2, shard=2)
    return Step(
        job=Job(model=model, **job),
        method=method,
        layout=layout,
        gpu=A100_80GB,
        micro_batch=micro_batch,
    )


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_a_case_is_the_step_as_the_worker_reads_it() -> None:
    steps = [
        make_step(),
        make_step(
            3,
            Method.SINGLE,
            finetune=Finetune(kind=FinetuneKind.LORA, r=4, targets=("c_attn",)),
            seq_len=128,
            grad_accum=2,
            precision=Precision.FP32,
            optimizer=Optimizer.SGD,
            attention=Attention.EAGER,
        ),
    ]
    for step in steps:
        assert parse_case(json.loads(json.dumps(case_of(step)))) == Case(step=step)


def test_one_child_answers_case_after_case_and_each_step_once() -> None:
    heard: list[str | None] = []
    with DryRun(command=python(ANSWERS), watch=heard.append) as dry_run:
        first = dry_run(make_step(1))
        second = dry_run(make_step(2))
        assert dry_run(make_step(1)) is first
        assert dry_run.num_runs == 2
        assert dry_run.count_parameters() == (100, 10)
    assert first.peak_bytes.allocated == 10 * GIB + 1
    assert second.peak_bytes.allocated == 10 * GIB + 3, "the same child"
    assert heard == ["fsdp, micro batch 1", None, "fsdp, micro batch 2", None]
    assert first.notes == ("simulated with torch 2.0, transformers 5.0", "something assumed")


def test_levels_and_their_upper_bounds() -> None:
    found = read_row(ROW, capacity_bytes=80 * GIB)
    assert found.peak_bytes.reserved == 12 * GIB
    assert found.peak_bytes.device == 12 * GIB + 512 * MIB
    assert found.upper_bytes.allocated == round(10.5 * GIB)
    assert found.upper_bytes.reserved == round(12.6 * GIB)
    assert found.upper_bytes.device == round(12.6 * GIB) + 640 * MIB


def test_cache_is_given_back_before_the_card_is_full() -> None:
    found = read_row(ROW, capacity_bytes=13 * GIB)
    assert found.upper_bytes.device == 13 * GIB


def test_a_full_card_is_bounded_as_the_formula_bounds_it() -> None:
    """10 GiB + 5 % of margin + 5 % that fragmentation may cost, and 0.5 GiB + 25 % outside."""
    reservation = {**ROW["reservation"], "reserved_bytes": 11 * GIB}
    found = read_row({**ROW, "reservation": reservation}, capacity_bytes=round(11.6 * GIB))
    assert found.upper_bytes.reserved == round(10.5 * GIB * 1.05)
    assert found.upper_bytes.device == round(10.5 * GIB * 1.05) + 640 * MIB


def test_what_does_not_fit_needs_more_than_there_is() -> None:
    reservation = {
        **ROW["reservation"],
        "reserved_bytes": 8 * GIB,
        "oom_instant": "forward_end",
        "oom_message": "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has",
        "oom_needed_bytes": 11 * GIB + 512 * MIB,
    }
    found = read_row({**ROW, "reservation": reservation}, capacity_bytes=9 * GIB)
    assert found.peak_bytes.device == 11 * GIB + 512 * MIB
    assert found.upper_bytes.device > found.peak_bytes.device
    expected = "at forward_end: CUDA out of memory. Tried to allocate 3.00 GiB."
    assert found.notes[-1] == expected


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.stdin.readline(); sys.exit('boom')", "exit code 1: boom"),
        ("raise SystemExit(3)", "exit code 3: no message"),
        ("import os; os.kill(os.getpid(), 9)", r"SIGKILL \(out of host memory\?\)"),
        ("print('hello', flush=True); input(); input()", "no row: 'hello"),
        ("print('[1]', flush=True); input(); input()", "no row"),
        ("print('{\"row\": {}}', flush=True); input(); input()", "no row"),
        ("print('{\"row\": null}', flush=True); input(); input()", "no row"),
    ],
)
def test_a_child_that_fails_is_one_line(script: str, said: str) -> None:
    with DryRun(command=python(script), time_limit_s=20) as dry_run:
        with pytest.raises(UserError, match=said) as caught:
            dry_run(make_step())
        assert not isinstance(caught.value, NotCoveredError)
    assert (caught.value.key, caught.value.value) == ("estimator", "dryrun")


def test_after_a_failure_a_new_child_is_started(tmp_path: Path) -> None:
    flag = tmp_path / "failed"
    script = f"import os\nif not os.path.exists({str(flag)!r}): open({str(flag)!r}, 'w'); exit(1)\n"
    with DryRun(command=python(script + ANSWERS)) as dry_run:
        with pytest.raises(UserError):
            dry_run(make_step())
        assert dry_run(make_step()).peak_bytes.allocated > 0


def test_a_child_that_cannot_be_started_is_one_line() -> None:
    with DryRun(command=["/no/such/program"]) as dry_run, pytest.raises(UserError, match="started"):
        dry_run(make_step())


def test_a_hanging_child_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{other.pid}}")
time.sleep(60)
"""
    start = time.monotonic()
    with DryRun(command=python(script), time_limit_s=2) as dry_run:
        with pytest.raises(UserError, match=r"dryrun\.time_limit_s=2: .*micro batch 7") as caught:
            dry_run(make_step(7))
        assert not isinstance(caught.value, NotCoveredError)
    assert time.monotonic() - start < 20
    wait_until_gone([int(pid) for pid in pids.read_text().split()])


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_an_interrupt_ends_the_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    dry_run = DryRun(command=python(script), time_limit_s=40)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        dry_run(make_step())
    thread.join()
    wait_until_gone([int(pid.read_text())])


def test_what_the_worker_refuses_is_not_covered() -> None:
    error = {"key": "method", "value": "tp", "allowed": "no experts"}
    script = f"input(); print({json.dumps({'error': error})!r}, flush=True); input()"
    with DryRun(command=python(script)) as dry_run:
        with pytest.raises(NotCoveredError, match="method=tp: no experts"):
            dry_run(make_step())
        assert dry_run.num_runs == 0


def test_deepspeed_is_refused_without_a_child() -> None:
    dry_run = DryRun(command=["/no/such/program"])
    with pytest.raises(NotCoveredError, match="method=zero3: DeepSpeed"):
        dry_run(make_step(method=Method.ZERO3))
