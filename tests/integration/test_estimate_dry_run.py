"""`estimator=dryrun` end to end, on models of two small blocks."""

from __future__ import annotations

import json
import os
import pickletools
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from src.architecture import describe
from src.estimate import run as run_estimate
from src.measure.case import A100_80GB
from src.measure.client import DryRun
from src.memory import count_model
from src.spec import Finetune, FinetuneKind, Job, Layout, Method, Model, Step
from tests.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
COHERE = {
    "model_type": "cohere",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
ASKED = ("model=./small.json", "estimator=dryrun", "seq_len=128", "gpu=t4")
COMMAND = [sys.executable, "-W", "error", "-m", "src.estimate"]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    (tmp_path / "cohere.json").write_text(json.dumps(COHERE))
    (tmp_path / "unknown.json").write_text(json.dumps({**SMALL, "model_type": "never-heard-of"}))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def workers(marker: str) -> list[int]:
    """Processes of this test that are still there, known by a variable of their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_ours = f"PEAKCAST_TEST={marker}".encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if is_ours:
                found.append(int(entry.name))
    return found


def test_json_snapshot_and_picture_of_one_method_twice_the_same(folder: Path) -> None:
    arguments = (*ASKED, "gpus=2", "method=fsdp", "micro_batch=2", "format=json")
    first = run(folder, *arguments, "snapshot=a.pickle", "plot=a.svg")
    answer = read(first)
    assert answer["estimator"] == "dryrun"
    (row,) = answer["methods"]
    peak = row["peak_bytes"]
    assert sum(row["ledger"][row["peak_instant"]].values()) == peak["allocated"]
    assert peak["allocated"] <= peak["reserved"] < peak["device"] < row["upper_bytes"]["device"]
    assert {"weights", "optimizer_states"} <= set(row["ledger"]["optimizer_step"])
    assert row["notes"][0].startswith("simulated with torch ")
    assert "transformers " in row["notes"][0]
    assert row["max_micro_batch"] > 2
    opcodes = {
        opcode.name for opcode, _, _ in pickletools.genops((folder / "a.pickle").read_bytes())
    }
    assert opcodes.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"})
    second = run(folder, *arguments, "snapshot=b.pickle", "plot=b.svg")
    assert second.stdout == first.stdout
    for suffix in ("pickle", "svg"):
        assert (folder / f"a.{suffix}").read_bytes() == (folder / f"b.{suffix}").read_bytes()
    written = {"a.pickle", "b.pickle", "a.svg", "b.svg"}
    assert {path.name for path in folder.iterdir() if path.suffix != ".json"} == written


def test_methods_that_cannot_be_run_are_left_out_of_all(folder: Path) -> None:
    arch = json.dumps({**SMALL, "vocab_size": 64})
    (folder / "small.json").write_text(arch)
    done = run(
        folder,
        *ASKED,
        "gpus=2",
        "micro_batch=1",
        "finetune=lora",
        "format=json",
        "plot=a.png",
    )
    answer = read(done)
    assert {row["method"] for row in answer["methods"]} == {"ddp", "fsdp", "fsdp-grad", "tp"}
    left_out = [warning for warning in answer["warnings"] if " left out: " in warning]
    assert [warning.split(" left out")[0] for warning in left_out] == ["zero1, zero2, zero3"]
    assert any(" dry runs were made" in warning for warning in answer["warnings"])
    assert min(matplotlib.image.imread(folder / "a.png").shape[:2]) > 300


def test_what_does_not_fit_is_a_row(folder: Path) -> None:
    done = run(
        folder, *ASKED, "micro_batch=4", "arch.vocab_size=40000000", "seq_len=256", "format=json"
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (3, "")
    (row,) = answer["methods"]
    assert (row["verdict"], row["max_micro_batch"]) == ("oom", 0)
    assert row["peak_bytes"]["device"] > answer["gpu"]["usable_bytes"]
    assert any("CUDA out of memory. Tried to allocate" in note for note in row["notes"])


def test_auto_asks_the_dry_run_about_a_model_the_formula_does_not_know(folder: Path) -> None:
    answer = read(
        run(folder, "model=./cohere.json", "seq_len=128", "gpu=t4", "micro_batch=1", "format=json")
    )
    assert answer["estimator"] == "dryrun"
    assert "the formula does not know cohere: the dry run answers" in answer["warnings"]
    assert answer["model"]["num_parameters"] > 512 * 64
    assert answer["methods"][0]["tokens_per_second"] is None
    assert answer["recommended"]["method"] == "single"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("method=zero3", "gpus=2"), "method=zero3: DeepSpeed's engine is not part of the dry run"),
        (("method=fsdp", "gpus=2", "snapshot=no/a.pickle"), "snapshot=no/a.pickle: a file in a"),
        (("gpus=2", "snapshot=a.pickle"), "snapshot=a.pickle: only with estimator=dryrun and one"),
        (("snapshot=a.json",), "snapshot=a.json: FILE.pickle|.pkl"),
        (("estimator=formula", "snapshot=a.pickle"), "snapshot=a.pickle: only with estimator="),
        (("dryrun.time_limit_s=0",), "dryrun.time_limit_s=0: a whole number, 1 or more"),
        (("dryrun.time_limit_s=soon",), "dryrun.time_limit_s=soon: seconds, 1 or more"),
        (("model=./unknown.json",), "model_type=never-heard-of: "),
        (("model=./unknown.json", "estimator=auto"), "model_type=never-heard-of: not among the"),
        (
            ("method=tp", "gpus=2", "sequence_parallel=true", "seq_len=31"),
            "seq_len=31: a multiple of the tensor-parallel degree 2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(folder: Path, arguments: tuple[str, ...], line: str) -> None:
    before = sorted(folder.iterdir())
    done = run_here(run_estimate, folder, *ASKED, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(line)
    assert sorted(folder.iterdir()) == before


def test_the_time_limit_ends_the_child(folder: Path) -> None:
    done = run(folder, *ASKED, "dryrun.time_limit_s=1", "micro_batch=1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dryrun.time_limit_s=1: the dry run of single with micro batch 1")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_the_command(folder: Path, sent: signal.Signals) -> None:
    marker = f"{os.getpid()}-{sent.name}-{time.time_ns()}"
    process = subprocess.Popen(
        [*COMMAND, *ASKED],
        cwd=folder,
        env={**environment(), "PEAKCAST_TEST": marker},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while len(workers(marker)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=30)
    assert stderr == b""
    assert process.returncode == (130 if sent is signal.SIGINT else -sent)
    deadline = time.monotonic() + 30
    while workers(marker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_parent_imports_no_torch(folder: Path) -> None:
    script = (
        "import sys; from src.estimate import estimate; "
        "report = estimate(model='./small.json', estimator='dryrun', seq_len=128, gpu='t4', "
        "micro_batch=1); print(report.estimator, report.methods[0].peak_bytes.allocated > 0); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "dryrun True\n", "")


def test_a_terminal_sees_what_is_run(folder: Path) -> None:
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *ASKED, "micro_batch=1", "format=json"],
        cwd=folder,
        env={**environment(), "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    seen = b""
    with suppress(OSError):  # the terminal is closed once nobody writes to it
        while chunk := os.read(master, 65536):
            seen += chunk
    os.close(master)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout)["estimator"] == "dryrun"
    assert b"dry run 1: single, micro batch 1" in seen


@pytest.mark.parametrize("finetune", [Finetune(), Finetune(kind=FinetuneKind.LORA)])
def test_parameters_are_counted_as_the_formula_counts_them(finetune: Finetune) -> None:
    config = {**SMALL, "num_hidden_layers": 9, "tie_word_embeddings": True}
    model = Model(name="small", hf_id=None, config=config)
    step = Step(
        job=Job(model=model, finetune=finetune, seq_len=32),
        method=Method.SINGLE,
        layout=Layout(),
        gpu=A100_80GB,
        micro_batch=1,
    )
    decoder = describe(model)
    with DryRun() as dry_run:
        found = dry_run(step)
    assert found.num_parameters == decoder.num_parameters
    trained = count_model(decoder, finetune=finetune).all.trained
    assert found.num_trainable_parameters == trained
