from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from src.estimate import estimate
from src.estimate import run as run_estimate
from src.report.as_json import report_dict
from tests.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-W", "error"]
HEAVY = ("torch", "transformers", "mlflow", "sklearn", "lightgbm", "pandas", "numpy")
CORRECTED_HEAVY = tuple(name for name in HEAVY if name != "numpy")
"""The shipped correction has no trees: it takes numpy, and no LightGBM."""
CONFIG = ROOT / "conf" / "model" / "opt-125m.yaml"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return {**os.environ, **offline, **more}


def run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in an empty folder that it has to leave as it was."""
    return subprocess.run(
        [*PYTHON, "-m", "src.estimate", *arguments],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import yaml

    config = yaml.safe_load(CONFIG.read_text("utf-8"))["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "bad.json").write_text("{bad")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "untyped.json").write_text('{"hidden_size": 8}')
    (tmp_path / "unknown.json").write_text('{"model_type": "never-heard-of"}')
    del config["hidden_size"]
    (tmp_path / "incomplete.json").write_text(json.dumps(config))
    (tmp_path / "empty").mkdir()
    return tmp_path


COMMANDS = [
    ["model=opt-1.3b", "gpus=4"],
    ["model=facebook/opt-1.3b"],
    ["model=llama-3-8b", "gpus=8", "gpu=h100-80gb", "finetune=lora", "seq_len=4096"],
    ["model=./config.json"],
    ["model=.", "gpus=2"],
    ["model=opt-1.3b", "gpus=4", "method=fsdp", "micro_batch=4"],
    ["model=opt-1.3b", "gpus=4", "gpu=a100", "method=[ddp,zero2]", "grad_accum=4"],
    ["model=opt-1.3b", "gpus=4", "gpu=v100-16gb", "estimator=llmem", "policy=llmem"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_table_is_printed_and_nothing_left_behind(folder: Path, arguments: list[str]) -> None:
    before = sorted(folder.rglob("*"))
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Recommended: " in done.stdout
    assert "\x1b" not in done.stdout
    assert sorted(folder.rglob("*")) == before


def test_json_is_the_answer_alone(folder: Path) -> None:
    done = run(folder, "model=opt-1.3b", "gpus=4", "method=fsdp", "micro_batch=4", "format=json")
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert [method["method"] for method in answer["methods"]] == ["fsdp"]
    assert answer["methods"][0]["micro_batch"] == 4
    assert answer["request"]["gpus"] == 4
    for method in answer["methods"]:
        peak = sum(method["ledger"][method["peak_instant"]].values())
        assert peak == pytest.approx(method["peak_bytes"]["allocated"], rel=1e-3)


def test_the_python_form_gives_the_same_answer(folder: Path) -> None:
    done = run(folder, "model=opt-1.3b", "gpus=4", "gpu=a100", "format=json")
    assert json.loads(done.stdout) == json.loads(
        json.dumps(report_dict(estimate(model="opt-1.3b", gpus=4, gpu="a100")))
    )


def test_the_request_of_an_answer_gives_the_same_answer() -> None:
    first = report_dict(estimate(model="opt-125m", gpus=2, gpu="t4", finetune="lora"))
    assert report_dict(estimate(**first["request"])) == first


def test_csv(folder: Path) -> None:
    done = run(folder, "model=opt-125m", "gpus=2", "gpu=nvidia h200", "format=csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert done.returncode == 0
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())
    assert {row["gpu"] for row in rows} == {"h200"}


def test_warnings_of_csv_go_to_stderr(folder: Path) -> None:
    done = run(folder, "model=opt-125m", "gpu=t4", "gpus_per_node=2", "format=csv")
    assert "warning: gpus_per_node has no effect with gpus=1" in done.stderr.splitlines()


@pytest.mark.parametrize("name", ["out.png", "out.svg", "out.pdf"])
def test_plot(folder: Path, name: str) -> None:
    before = set(folder.iterdir())
    done = run_here(
        run_estimate, folder, "model=opt-1.3b", "gpus=4", "gpu=v100-16gb", f"plot={name}"
    )
    assert done.returncode in (0, 3), done.stderr
    assert "Ledger of " in done.stdout
    assert set(folder.iterdir()) - before == {folder / name}
    assert (folder / name).stat().st_size > 1000


def test_nothing_fits_is_exit_3_and_still_an_answer(folder: Path) -> None:
    done = run(folder, "model=llama-3.1-405b", "gpu=t4", "format=json")
    answer = json.loads(done.stdout)
    assert done.returncode == 3
    assert answer["recommended"] is None
    assert answer["warnings"]
    table = run(folder, "model=llama-3.1-405b", "gpu=t4")
    assert table.returncode == 3
    assert "Recommended: nothing fits" in table.stdout


ERRORS = [
    (["model=opt-1.3"], "model", "opt-1.3"),
    (["model=nothing-like-it"], "model", "nothing-like-it"),
    (["model=no/such-model"], "model", "no/such-model"),
    (["model=1_1_1"], "model", "1_1_1"),
    (["model="], "model", ""),
    (["gpus=4"], "model", ""),
    (["model=gpt2", "gpus=0"], "gpus", "0"),
    (["model=gpt2", "gpus=-1"], "gpus", "-1"),
    (["model=gpt2", "gpus=four"], "gpus", "four"),
    (["model=gpt2", "gpus=1.5"], "gpus", "1.5"),
    (["model=gpt2", "gpus="], "gpus", ""),
    (["model=gpt2", "gpus=1,2"], "gpus", "1,2"),
    (["model=gpt2", "gpus=range(1,4)"], "gpus", "range(1,4)"),
    (["model=gpt2", "gpus=(1"], "gpus", "(1"),
    (["model=gpt2", "gpus=12"], "gpus", "12"),
    (["model=gpt2", "gpu=4"], "gpu", "4"),
    (["model=gpt2", "gpu=a1000"], "gpu", "a1000"),
    (["model=opt-1.3b", "gpus=8", "method=tp", "tp=7"], "tp", "7"),
    (["model=gpt2", "gpus=2", "tp=4"], "tp", "4"),
    (["model=gpt2", "tp=0"], "tp", "0"),
    (["model=gpt2", "micro_batch=-1"], "micro_batch", "-1"),
    (["model=gpt2", "micro_batch=0"], "micro_batch", "0"),
    (["model=gpt2", "micro_batch=1000000000"], "micro_batch", "1000000000"),
    (["model=gpt2", "seq_len=0"], "seq_len", "0"),
    (["model=gpt2", "seq_len=2048"], "seq_len", "2048"),
    (["model=bad.json"], "model", "bad.json"),
    (["model=empty.json"], "model", "empty.json"),
    (["model=list.json"], "model", "list.json"),
    (["model=untyped.json"], "model_type", "None"),
    (["model=unknown.json"], "model_type", "never-heard-of"),
    (["model=incomplete.json"], "hidden_size", "missing"),
    (["model=./nothing.json"], "model", "./nothing.json"),
    (["model=empty"], "model", "empty"),
    (["model=gpt2", "method=tp"], "method", "tp"),
    (["model=gpt2", "method=fsdp,ddp+tp"], "method", "ddp+tp"),
    (["model=gpt2", "gpus=4", "method=single"], "method", "single"),
    (["model=gpt2", "method=fsdp2"], "method", "fsdp2"),
    (["model=gpt2", "method=[fsdp"], "method", "[fsdp"),
    (["model=gpt2", "method=[]"], "method", "[]"),
    (["model=gpt2", "finetune=adapter"], "finetune", "adapter"),
    (["model=gpt2", "finetune.r=8"], "finetune.r", "8"),
    (["model=gpt2", "finetune=lora", "finetune.r=0"], "finetune.r", "0"),
    (["model=gpt2", "finetune=lora", "finetune.dropout=2"], "finetune.dropout", "2"),
    (["model=gpt2", "precision=bf16"], "precision", "bf16"),
    (["model=gpt2", "checkpointing=false"], "checkpointing", "false"),
    (["model=gpt2", "estimator=magic"], "estimator", "magic"),
    (["model=gpt2", "runtime=gemini", "estimator=formula"], "runtime", "gemini"),
    (["model=gpt2", "estimator=llmem", "finetune=lora"], "finetune", "lora"),
    (["model=gpt2", "gpus=4", "estimator=llmem", "method=zero2"], "method", "zero2"),
    (["model=gpt2", "policy=cheapest"], "policy", "cheapest"),
    (["model=gpt2", "zero.reduce_bucket_size=-1"], "zero.reduce_bucket_size", "-1"),
    (["model=gpt2", "format=xml"], "format", "xml"),
    (["model=gpt2", "plot=out.jpg"], "plot", "out.jpg"),
    (["model=gpt2", "plot=nowhere/out.png"], "plot", "nowhere/out.png"),
    (["model=gpt2", "plot=/proc/out.png"], "plot", "/proc/out.png"),
    (["model=gpt2", "trust_remote_code=maybe"], "trust_remote_code", "maybe"),
    (["model=gpt2", "arch.n_layer=0"], "arch.n_layer", "0"),
    (["model=gpt2", "arch.n_layer=(("], "arch.n_layer", "(("),
    (["model=gpt2", "gpuss=4"], "gpuss", "4"),
    (["model=gpt2", "+foo=4"], "foo", "4"),
    (["model=gpt2", "hydra.mode=MULTIRUN"], "hydra.mode", "MULTIRUN"),
    (["model=gpt2", "~gpus"], "argument", "~gpus"),
    (["gpt2"], "argument", "gpt2"),
    (["list=things"], "list", "things"),
    (["model=gpt2", "layouts=best"], "layouts", "best"),
    (["model=gpt2", "layouts=all"], "layouts", "all"),
    (["model=gpt2", "gpus=32768", "gpu=t4", "layouts=pareto"], "gpus", "32768"),
    (["model=gpt2", "layouts=pareto", "estimator=dryrun"], "estimator", "dryrun"),
    (["model=gpt2", "layouts=pareto", "plot=a.png"], "plot", "a.png"),
    (["model=opt-1.3b", "gpus=8", "layouts=pareto", "tp=3"], "tp", "3"),
    (["--multirun", "model=gpt2"], "option", "--multirun"),
    (["-m", "model=gpt2"], "option", "-m"),
    (["--gpus", "4"], "option", "--gpus"),
    (["--cfg", "hydra"], "option", "--cfg hydra"),
    (["--cfg", "job", "gpus=four"], "gpus", "four"),
    (["model=${nothing}"], "model", "${nothing}"),
]


@pytest.mark.parametrize(
    ("arguments", "key", "value"), ERRORS, ids=[" ".join(error[0]) for error in ERRORS]
)
def test_wrong_input_is_one_line_and_exit_1(
    folder: Path, arguments: list[str], key: str, value: str
) -> None:
    before = sorted(folder.rglob("*"))
    done = run_here(run_estimate, folder, *arguments)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{key}={value}" in done.stderr
    assert len(done.stderr) > len(f"{key}={value}: \n")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["gpus=4"], ["model=bad.json"], ["--multirun"]])
def test_a_process_says_the_same(folder: Path, arguments: list[str]) -> None:
    done, here = run(folder, *arguments), run_here(run_estimate, folder, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", here.stderr)


def test_gpu_with_a_number_asks_for_gpus(folder: Path) -> None:
    assert "did you mean gpus=4?" in run_here(run_estimate, folder, "model=gpt2", "gpu=4").stderr


def test_a_sequence_beyond_the_rotary_range_is_a_warning(folder: Path) -> None:
    done = run(folder, "model=pythia-70m", "gpu=a100", "seq_len=4096", "format=json")
    assert done.returncode == 0, done.stderr
    assert any("seq_len" in warning for warning in json.loads(done.stdout)["warnings"])


def test_help_names_every_key_once(folder: Path) -> None:
    from src.config.keys import KEYS

    done = run(folder, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for name in KEYS:
        assert len([line for line in lines if line.startswith(f"  {name} ")]) == 1, name
    assert max(map(len, lines)) <= 110
    assert run_here(run_estimate, folder, "-h").stdout == done.stdout


def test_version(folder: Path) -> None:
    done = run(folder, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("peakcast ")


def test_cfg_prints_the_configuration(folder: Path) -> None:
    done = run(folder, "--cfg", "job", "gpus=4", "model=a=b", "finetune=lora")
    assert (done.returncode, done.stderr) == (0, "")
    for line in ("gpus: 4", "model: a=b", "  r: 16"):
        assert line in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("listing", "name"), [("models", "opt-1.3b"), ("gpus", "h200"), ("methods", "fsdp")]
)
def test_list(folder: Path, listing: str, name: str) -> None:
    done = run(folder, f"list={listing}")
    assert (done.returncode, done.stderr) == (0, "")
    assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines())
    as_json, as_csv = (
        run_here(run_estimate, folder, f"list={listing}", f"format={form}").stdout
        for form in ("json", "csv")
    )
    rows, table = json.loads(as_json), list(csv.DictReader(io.StringIO(as_csv)))
    assert rows == table
    assert name in [next(iter(row.values())) for row in rows]


def test_layouts_are_rows(folder: Path) -> None:
    asked = ("model=opt-1.3b", "gpu=a100", "gpus=8", "gpus_per_node=8")
    every = run_here(run_estimate, folder, *asked, "layouts=all", "format=csv")
    best = run_here(run_estimate, folder, *asked, "layouts=pareto", "format=json")
    assert (every.returncode, every.stderr, best.returncode) == (0, "", 0)
    rows = list(csv.DictReader(io.StringIO(every.stdout)))
    assert len(rows) > 100
    sizes = [row["device_bytes"] for row in json.loads(best.stdout)]
    assert sizes == sorted(sizes)
    table = run_here(run_estimate, folder, *asked, "layouts=pareto").stdout
    told = [line for line in table.splitlines() if " GiB " in line]
    assert f"{len(sizes) - len(told)} more are less than 1% faster each" in table
    assert 3 < len(told) < 40
    for more in (["layouts=pareto"], ["layouts=all", "format=json"]):
        assert run_here(run_estimate, folder, "model=llama-2-70b", "gpu=t4", *more).returncode == 3


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -W error -m src.estimate list=models; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | head -c 1"],
        cwd=folder,
        env=environment(PYTHONUNBUFFERED="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PYTHON, "-m", "src.estimate", "list=gpus"],
            cwd=folder,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("output=stdout: cannot be written (No space left")
    assert len(done.stderr.splitlines()) == 1


def test_an_ascii_terminal_can_be_written_to(folder: Path) -> None:
    (folder / "mödel").mkdir()
    (folder / "config.json").rename(folder / "mödel" / "config.json")
    done = run(folder, "model=./mödel", "gpu=t4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "m\\xf6del" in done.stdout


def test_a_folder_that_cannot_be_written_to_is_enough(folder: Path) -> None:
    folder.chmod(0o555)
    try:
        assert run(folder, "model=opt-125m", "gpu=t4").returncode == 0
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import src.estimate", (*HEAVY, "matplotlib", "rich")),
        (
            "from src.estimate import run; run(['model=opt-1.3b', 'estimator=formula'])",
            (*HEAVY, "matplotlib"),
        ),
        (
            "from src.estimate import run; run(['model=opt-1.3b', 'format=json'])",
            (*CORRECTED_HEAVY, "matplotlib", "rich"),
        ),
        (
            "from src.estimate import run; run(['model=opt-1.3b', 'gpus=4'])",
            (*CORRECTED_HEAVY, "matplotlib"),
        ),
    ],
    ids=["import", "formula", "json", "table"],
)
def test_no_heavy_library_is_loaded(folder: Path, code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}; import sys; print(sorted(set({absent}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run(
        [*PYTHON, "-c", check],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("key", ["format", "plot", "list"])
def test_output_options_are_for_the_command(key: str) -> None:
    from src.errors import UserError

    with pytest.raises(UserError, match=f"{key}=x: for the command line only"):
        estimate(model="gpt2", **{key: "x"})
