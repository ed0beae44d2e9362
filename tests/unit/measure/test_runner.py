"""Cases in child processes that behave well and badly: every outcome is a row, once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from src.errors import UserError
from src.measure.run_many import read_cases
from src.measure.runner import Conditions, git_commit, run_case, run_cases, visible_gpus
from src.record import Outcome, Source, open_rows, read_rows
from tests.fake_worker import GIB

ROOT = Path(__file__).resolve().parents[3]


def worker(mode: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.fake_worker", mode)


def case(micro_batch: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": {"name": "tiny"}, "micro_batch": micro_batch, **more}


def conditions(mode: str, **more: Any) -> Conditions:
    return Conditions(campaign="test", command=worker(mode), **{"timeout_s": 20.0, **more})


def is_running(marker: str) -> bool:
    """Whether any process has `marker` among its arguments."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in arguments.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def test_a_step_that_ran_is_a_row_with_all_that_is_known_of_it() -> None:
    row = run_case(case(3), conditions("ok", git_commit="abc"))
    assert (row.outcome, row.source, row.comm) == (Outcome.OK, Source.SIMULATED, "none")
    assert row.peak_bytes == {"allocated": 3 * GIB, "reserved": 6 * GIB, "device": 7 * GIB}
    assert row.instants["forward_end"] == {"allocated": 3 * GIB, "reserved": 6 * GIB}
    assert row.numbers["num_alloc_retries"] == 0
    assert "step_seconds" not in row.numbers
    assert row.provenance.campaign == "test"
    assert row.provenance.git_commit == "abc"
    assert 0 < row.provenance.duration_s < 20
    assert row.environment["gpu"] == "none"


@pytest.mark.parametrize(
    ("mode", "outcome", "message"),
    [
        ("oom", Outcome.OOM, "CUDA out of memory."),
        ("kill", Outcome.CRASHED, "SIGKILL (out of host memory?)"),
        ("refuse", Outcome.CRASHED, "model_type=nope: unknown"),
        ("garble", Outcome.CRASHED, "answered with what is no row"),
        ("invalid", Outcome.INVALID, None),
    ],
)
def test_what_goes_wrong_is_a_row(mode: str, outcome: Outcome, message: str | None) -> None:
    row = run_case(case(), conditions(mode))
    assert row.outcome is outcome
    if message is None:
        assert row.message is None
    else:
        assert row.message is not None
        assert message in row.message


def test_a_command_that_is_not_there_is_a_row() -> None:
    row = run_case(case(), Conditions(campaign="test", command=["/nowhere/python"]))
    assert row.outcome is Outcome.CRASHED
    assert row.message == "its process cannot be started: No such file or directory"


def test_a_child_that_hangs_is_ended_with_its_group() -> None:
    marker = f"--marker={os.getpid()}-{time.monotonic_ns()}"
    sleeper = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)', {marker!r}]"
    script = f"import subprocess, time; subprocess.Popen({sleeper}); time.sleep(600)"
    hanging = Conditions(
        campaign="test", timeout_s=1.0, command=(sys.executable, "-c", script, marker)
    )
    begun = time.monotonic()
    row = run_case(case(), hanging)
    assert (row.outcome, row.message) == (Outcome.TIMEOUT, "ended after 1 s")
    assert time.monotonic() - begun < 5
    assert not is_running(marker)


def test_a_case_on_the_machines_gpus_has_a_process_for_each() -> None:
    two = case(5, device="cuda", layout={"dp": 2})
    row = run_case(two, conditions("rank-ok", num_gpus=2))
    assert (row.source, row.comm, row.outcome) == (Source.MEASURED, "nccl", Outcome.OK)
    assert (row.fullest_rank, row.peak_bytes["device"]) == (1, 13 * GIB)
    assert [rank.peak_bytes["allocated"] for rank in row.ranks] == [5 * GIB, 6 * GIB]
    assert row.notes == ("2",)


def test_a_case_on_more_gpus_than_there_are_has_one_process() -> None:
    row = run_case(case(device="cuda", layout={"dp": 2, "tp": 2}), conditions("ok", num_gpus=2))
    assert (row.ranks, row.comm) == ((), "fake")


def test_one_rank_that_runs_out_ends_those_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("src.measure.runner._GRACE_S", 0.5)
    begun = time.monotonic()
    row = run_case(case(device="cuda", layout={"dp": 2}), conditions("rank-oom", num_gpus=2))
    assert time.monotonic() - begun < 5
    assert [rank.outcome for rank in row.ranks] == [Outcome.TIMEOUT, Outcome.OOM]
    assert (row.outcome, row.fullest_rank) == (Outcome.OOM, 1)


def test_no_case_is_run_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_rows(path) as file:
        first = list(run_cases([case(1), case(2), case(1)], file, conditions("ok")))
        assert list(run_cases([case(1), case(2)], file, conditions("ok"))) == []
    with open_rows(path) as file:
        second = list(run_cases([case(1), case(3)], file, conditions("oom")))
    assert [row.case["micro_batch"] for row in (*first, *second)] == [1, 2, 3]
    assert list(read_rows(path).rows) == [*first, *second]


def test_no_case_is_started_that_would_pass_the_budget(tmp_path: Path) -> None:
    ticks = iter([0.0, 0.0, 40.0, 80.0, 120.0])
    with open_rows(tmp_path / "rows.jsonl") as file:
        cases = [case(number) for number in range(1, 6)]
        rows = run_cases(cases, file, conditions("ok", budget_s=110.0), clock=lambda: next(ticks))
        assert len(list(rows)) == 2


CAMPAIGN = """
import sys
from pathlib import Path
from src.measure.runner import Conditions, run_cases
from src.record import open_rows
command = (sys.executable, "-m", "tests.fake_worker", "sleep:0.1", "worker-" + sys.argv[2])
cases = [{"model": {"name": "tiny"}, "micro_batch": number} for number in range(1, 13)]
with open_rows(Path(sys.argv[1]), wait_s=5) as file:
    for row in run_cases(cases, file, Conditions(campaign="test", command=command)):
        print(row.case["micro_batch"], flush=True)
"""


def test_killed_at_any_moment_it_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    path, marker = tmp_path / "rows.jsonl", str(tmp_path)
    chance = random.Random(5)
    finished: list[str] = []
    num_kills = 0
    for _ in range(60):
        process = subprocess.Popen(
            [sys.executable, "-c", CAMPAIGN, str(path), marker],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=chance.uniform(0.1, 0.7))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            num_kills += 1
            said, _ = process.communicate()
        finished += said.split()
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert num_kills >= 3
    rows = read_rows(path)
    assert [row.case["micro_batch"] for row in rows.rows] == list(range(1, 13))
    assert rows.damaged == ()
    assert len(finished) == len(set(finished)), "what was reported once was not run again"
    give_up = time.monotonic() + 10
    while is_running(f"worker-{marker}") and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_running(f"worker-{marker}"), "a worker whose campaign is gone ends"


def test_interrupting_ends_the_child_and_keeps_the_rows(tmp_path: Path) -> None:
    path, marker = tmp_path / "rows.jsonl", str(tmp_path)
    script = CAMPAIGN.replace("sleep:0.1", "hang")
    with open_rows(path) as file:
        list(run_cases([case(1)], file, conditions("ok")))
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), marker],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 20
    while not is_running(f"worker-{marker}") and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in said
    assert not is_running(f"worker-{marker}")
    assert [row.case["micro_batch"] for row in read_rows(path).rows] == [1]


def test_gpus_are_asked_for_in_a_child() -> None:
    found = [{"gpu": "NVIDIA A100-SXM4-80GB", "capacity_bytes": 80 * GIB}]
    answer = f"print({json.dumps(json.dumps({'row': found}))})"
    assert visible_gpus((sys.executable, "-c", answer)) == found
    with pytest.raises(UserError, match="device=cuda: its process ended with exit code 3"):
        visible_gpus((sys.executable, "-c", "raise SystemExit(3)"))


def test_the_commit_is_that_of_the_code() -> None:
    commit = git_commit()
    if (ROOT / ".git").exists():
        assert commit is not None
        assert len(commit.removesuffix("-dirty")) == 40


def test_cases_are_checked_before_any_is_run(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    good = json.dumps({"model": {"config": {"model_type": "gpt2"}}})
    path.write_text(f"{good}\n\n{good}\n")
    assert len(read_cases(path)) == 2
    for wrong in ("{", '{"modle": 1}', '{"model": {}}'):
        path.write_text(f"{good}\n{wrong}\n")
        with pytest.raises(UserError, match=r"cases=.*jsonl:2: "):
            read_cases(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_cases(tmp_path)
