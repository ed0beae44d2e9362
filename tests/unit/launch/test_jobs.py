"""Cases as jobs of SLURM: what sbatch is given, and what its answers become; no SLURM is needed."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit

from src.errors import UserError
from src.launch import Jobs, run_campaign, running
from src.launch.submission import Submitter, read_options
from src.measure.rows import RankEnd, make_row
from src.measure.runner import Conditions
from src.record import Outcome, Provenance, Row, case_id_of, open_rows, read_rows
from tests.fake_worker import row as answer

SBATCH = """#!{python}
import pathlib, sys
home = pathlib.Path({home!r})
number = len(list(home.glob("*.sh"))) + 1
(home / f"{{number}}.sh").write_text(pathlib.Path(sys.argv[1]).read_text())
if (home / "refuse").exists():
    sys.exit("sbatch: error: invalid partition specified: nowhere")
print("Submitted batch job", number)
"""
SACCT = """#!{python}
import pathlib
home = pathlib.Path({home!r})
print("JobID|State|NodeList")
for number in range(1, 1 + len(list(home.glob("*.sh")))):
    state = home / f"{{number}}.state"
    print(f"{{number}}|{{state.read_text() if state.exists() else 'RUNNING'}}|node1")
"""
SCANCEL = """#!{python}
import pathlib, sys
(pathlib.Path({home!r}) / f"{{sys.argv[1]}}.cancelled").touch()
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a SLURM that only writes down what it is asked."""
    home = tmp_path / "slurm"
    (home / "bin").mkdir(parents=True)
    programs = {"sbatch": SBATCH, "sacct": SACCT, "scancel": SCANCEL, "srun": "#!/bin/sh\n"}
    for name, text in programs.items():
        program = home / "bin" / name
        program.write_text(text.format(python=sys.executable, home=str(home)))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(running, "_LATE_S", 0.0)
    monkeypatch.setattr(running, "_POLL_S", 0.01)
    watcher = submitit.slurm.slurm.SlurmInfoWatcher
    monkeypatch.setattr(
        watcher, "update_if_long_enough", lambda self, mode: mode != "cache" and self.update()
    )
    submitit.SlurmJob.watcher.clear()
    submitit.SlurmJob.watcher._registered.clear()
    yield home
    submitit.SlurmJob.watcher.clear()
    submitit.SlurmJob.watcher._registered.clear()


def case(micro_batch: int, *, dp: int = 1) -> dict[str, Any]:
    return {
        "device": "cuda",
        "model": {"name": "tiny", "config": {"model_type": "llama"}},
        "micro_batch": micro_batch,
        "method": "ddp" if dp > 1 else "single",
        "layout": {"dp": dp, "tp": 1, "shard": 1},
    }


def jobs(folder: Path, **more: Any) -> Jobs:
    asked: dict[str, Any] = {
        "cluster": "slurm",
        "folder": folder,
        "max_jobs": 8,
        "gpus_per_node": 4,
        "minutes": 7,
        "sbatch": {},
    }
    return Jobs(**asked | more)


CONDITIONS = Conditions(campaign="smoke", timeout_s=60)


def leave_row(folder: Path, of: dict[str, Any]) -> None:
    """What the job of a case that went well leaves in its folder."""
    end = RankEnd(outcome=Outcome.OK, answer=answer())
    made = Provenance(campaign="smoke", started="2025-01-01T00:00:00+00:00", duration_s=1)
    with open_rows(folder / f"{case_id_of(of)}.jsonl") as file:
        file.append(make_row(of, [end], made))


def run(
    cases: list[dict[str, Any]], rows: Path, how: Jobs, conditions: Conditions = CONDITIONS
) -> list[Row]:
    with open_rows(rows) as file:
        return list(run_campaign(cases, file, conditions, how))


def test_each_case_is_a_job_with_its_gpus(tmp_path: Path, slurm: Path) -> None:
    folder, cases = tmp_path / "jobs", [case(1), case(2, dp=4), case(3, dp=8)]
    more = {"nice": "100", "exclusive": True}
    how = jobs(folder, partition="gpu", account="me", qos="low", constraint="h100", sbatch=more)
    for number in (1, 2, 3):
        (slurm / f"{number}.state").write_text("CANCELLED by 5")
    run(cases, tmp_path / "rows.jsonl", how)
    scripts = [(slurm / f"{number}.sh").read_text() for number in (1, 2, 3)]
    for script, num_gpus in zip(scripts, (1, 4, 1), strict=True):
        lines = script.splitlines()
        for words in ("partition=gpu", "account=me", "qos=low", "constraint=h100", "time=7"):
            assert f"#SBATCH --{words}" in lines
        assert f"#SBATCH --gpus-per-node={num_gpus}" in lines
        assert {"#SBATCH --nice=100", "#SBATCH --exclusive", "#SBATCH --no-requeue"} <= set(lines)
        assert "#SBATCH --nodes=1" in lines
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_job_that_leaves_no_row_is_one(tmp_path: Path, slurm: Path) -> None:
    folder, states = tmp_path / "jobs", ["TIMEOUT", "PREEMPTED", "FAILED", "OUT_OF_MEMORY"]
    for number, state in enumerate(states, start=1):
        (slurm / f"{number}.state").write_text(state)
    folder.mkdir()
    (folder / "3_0_log.err").write_text("one\nslurmstepd: error: Exceeded memory\n\n")
    cases = [case(number) for number in range(1, 5)]
    rows = run(cases, tmp_path / "rows.jsonl", jobs(folder))
    assert [row.outcome.value for row in rows] == ["timeout", "crashed", "crashed", "crashed"]
    assert rows[1].message == "slurm job 2 left no row (PREEMPTED): no message"
    assert rows[2].message == "slurm job 3 left no row (FAILED): slurmstepd: error: Exceeded memory"
    assert rows == list(read_rows(tmp_path / "rows.jsonl").rows)
    assert run(cases, tmp_path / "rows.jsonl", jobs(folder)) == []
    assert len(list(slurm.glob("*.sh"))) == 4


def test_submitit_that_saw_the_time_limit_first_is_a_timeout(tmp_path: Path, slurm: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (slurm / "1.state").write_text("FAILED")
    (folder / "1_0_log.err").write_text("Caught signal SIGUSR2 on n: this job is timed-out.\nbye\n")
    (row,) = run([case(1)], tmp_path / "rows.jsonl", jobs(folder))
    assert row.outcome is Outcome.TIMEOUT


def test_what_ended_while_nobody_looked_is_taken_and_not_run_again(
    tmp_path: Path, slurm: Path
) -> None:
    folder, first, second = tmp_path / "jobs", case(1), case(2)
    folder.mkdir()
    leave_row(folder, first)
    (folder / f"{case_id_of(second)}.job").write_text("9")
    with open_rows(tmp_path / "rows.jsonl") as file:
        found = run_campaign([first, second], file, CONDITIONS, jobs(folder))
        assert next(found).case == first
        assert [row.case for row in file.rows] == [first]
        leave_row(folder, second)  # job 9, which an earlier process submitted, comes to its end
        assert next(found).case == second
        assert next(found, None) is None
    assert not list(slurm.glob("*.sh"))
    assert not list(folder.iterdir())


def test_at_most_so_many_jobs_at_a_time_and_none_after_the_budget(
    tmp_path: Path, slurm: Path
) -> None:
    folder, cases = tmp_path / "jobs", [case(number) for number in range(1, 6)]
    with open_rows(tmp_path / "rows.jsonl") as file:
        now = 0.0
        conditions = Conditions(campaign="smoke", budget_s=100)
        how = jobs(folder, max_jobs=2)
        found = running.run_jobs(cases, file, conditions, how, clock=lambda: now)
        folder.mkdir()
        leave_row(folder, cases[0])
        assert next(found).case == cases[0]
        assert len(list(slurm.glob("*.sh"))) == 1  # the first needed none
        leave_row(folder, cases[1])
        assert next(found).case == cases[1]
        assert len(list(slurm.glob("*.sh"))) == 1  # nobody has asked for more
        leave_row(folder, cases[2])
        assert next(found).case == cases[2]
        assert len(list(slurm.glob("*.sh"))) == 2
        now = 101.0
        leave_row(folder, cases[3])
        assert next(found).case == cases[3]
        assert next(found, None) is None
    assert len(list(slurm.glob("*.sh"))) == 2


def test_an_interrupted_campaign_cancels_its_jobs(tmp_path: Path, slurm: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    leave_row(folder, case(1))
    with open_rows(tmp_path / "rows.jsonl") as file:
        found = run_campaign([case(1), case(2)], file, CONDITIONS, jobs(folder))
        next(found)
        with pytest.raises(KeyboardInterrupt):
            found.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert [path.name for path in slurm.glob("*.cancelled")] == ["1.cancelled"]
    assert not list(folder.glob("*.job"))


def test_no_result_of_submitit_is_ever_opened(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "1_0_result.pkl").write_bytes(b"anything")
    for name in ("pickle_load", "cloudpickle_load"):
        monkeypatch.setattr(submitit.core.utils, name, refuse, raising=False)
    (row,) = run([case(1)], tmp_path / "rows.jsonl", jobs(folder))
    assert row.outcome is Outcome.CRASHED
    assert list(slurm.glob("*.sh"))


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        work()
    return str(error.value)


def test_a_job_that_sbatch_refuses_ends_the_campaign_in_one_line(
    tmp_path: Path, slurm: Path
) -> None:
    (slurm / "refuse").touch()
    line = refused(lambda: run([case(1)], tmp_path / "rows.jsonl", jobs(tmp_path / "jobs")))
    assert line.startswith("launcher=slurm: slurm refuses a job (")
    assert "invalid partition" in line
    assert "\n" not in line


def test_without_submitit_or_slurm_it_is_said_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refused(lambda: Submitter(jobs(tmp_path / "jobs"), name="smoke"))
    assert line == (
        "launcher=slurm: only where sbatch and srun are; launcher.cluster=local tries it out"
    )
    monkeypatch.setitem(sys.modules, "submitit", None)
    line = refused(lambda: Submitter(jobs(tmp_path / "jobs"), name="smoke"))
    assert "pip install 'submitit>=1.5'" in line


@pytest.mark.usefixtures("slurm")
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(lambda: Submitter(jobs(tmp_path / "file" / "jobs"), name="smoke"))
    assert line.startswith(f"launcher.folder={tmp_path / 'file' / 'jobs'}: cannot be made")


def test_options_of_sbatch_are_read_as_they_are_typed() -> None:
    text = "--nice=100 --exclusive --comment='two words'"
    assert read_options(text) == {"nice": "100", "exclusive": True, "comment": "two words"}
    assert read_options("") == {}
    for wrong in ("-n 4", "nice=100", "--", "--a='", "--comment='a\nb'"):
        assert refused(lambda text=wrong: read_options(text)).startswith("launcher.sbatch=")


@pytest.mark.usefixtures("slurm")
def test_the_job_is_given_the_case_as_text(tmp_path: Path) -> None:
    folder, mine = tmp_path / "jobs", case(1)
    with open_rows(tmp_path / "rows.jsonl") as file:
        found = run_campaign([case(5), mine], file, CONDITIONS, jobs(folder))
        folder.mkdir()
        leave_row(folder, case(5))
        next(found)
        name = case_id_of(mine)
        assert json.loads((folder / f"{name}.case.jsonl").read_text()) == mine
        assert (folder / f"{name}.job").read_text() == "1"
        found.close()  # type: ignore[attr-defined]
