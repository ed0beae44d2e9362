"""README and docs against the program: commands, output, links, file tree, hand arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.refresh_readme import PICTURE_ARGUMENTS, keys, main_output, matrix, section
from src.config.gpu import local_gpu_names
from src.estimate import estimate

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FORMULA = (ROOT / "docs" / "formula.md").read_text("utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "profiling" / "README.md",
    ROOT / "models" / "README.md",
]


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Lines that run the program, without the ones that set an environment up."""
    lines = "".join(fenced(README, "bash")).splitlines()
    return [line for line in lines if "python -m src." in line and "venv" not in line]


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command under this Python, in a folder of its own."""
    (folder / "docs").mkdir()
    return subprocess.run(
        ["bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}; set -o pipefail; {command}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", commands())
def test_every_command_runs(command: str, tmp_path: Path) -> None:
    done = run_shell(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_python_example_runs(tmp_path: Path) -> None:
    (source,) = fenced(README, "python")
    script = tmp_path / "example.py"
    script.write_text(source, "utf-8")
    done = run_shell(f"python {script}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ddp ")


def test_the_set_up_commands_are_single_lines_that_pin_torch_first() -> None:
    first, checks = fenced(README, "bash")[:2]
    assert first.count("\n") == 1
    assert first.index("install torch==") < first.index("install -e .")
    assert first.rstrip().endswith("-m src.estimate model=opt-1.3b gpus=4")
    assert checks == "bash .ci/run\n"
    pinned = re.search(r"torch==[\d.]+", first)
    assert pinned is not None
    assert pinned.group(0) in (ROOT / ".ci" / "run").read_text("utf-8")


@pytest.mark.skipif(bool(local_gpu_names()), reason="gpu=auto takes this machine's GPU")
def test_the_pasted_output_is_what_the_command_prints() -> None:
    assert section(README, "main output") == main_output(), "run scripts/refresh_readme.py"


def test_the_pasted_keys_and_summary_are_current() -> None:
    assert section(README, "keys") == keys(), "run scripts/refresh_readme.py"
    assert section(README, "matrix") == matrix(), "run scripts/refresh_readme.py"


def test_the_picture_is_the_one_of_its_command() -> None:
    (command,) = [line for line in commands() if "plot=docs/ledger.png" in line]
    assert command.replace('"', "").split()[3:] == list(PICTURE_ARGUMENTS)
    picture = ROOT / "docs" / "ledger.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_the_file_tree_exists() -> None:
    (tree,) = [block for block in fenced(README, "text") if "src/estimate.py" in block]
    for line in tree.splitlines():
        path = line.split()[0]
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path


def test_the_counts_of_models_and_gpus_are_current() -> None:
    for kind, word in (("model", "models"), ("gpu", "GPUs")):
        count = len(list((ROOT / "conf" / kind).glob("*.yaml")))
        assert re.search(rf"conf/{kind}/ +{count} {word}", README)


def test_the_published_full_run_of_mistral_is_as_told() -> None:
    report = estimate(
        model="mistral-7b-v0.1",
        gpus=1,
        gpu="a100-80gb",
        precision="bf16-true",
        optimizer="adamw",
        seq_len=4096,
        micro_batch=4,
    )
    assert f"{report.methods[0].peak_bytes.allocated:,} B against 72,434,837,504 B" in README


def hand_table(heading: str) -> dict[str, tuple[str, int]]:
    """Rows of a table of docs/formula.md: first cell -> (arithmetic, bytes)."""
    body = FORMULA.split(f"| {heading} | arithmetic |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()[2:]]
    return {name: (words, int(number.replace(",", ""))) for name, words, number in rows}


def worked_out(arithmetic: str) -> int:
    """The value of whole numbers joined by `+`, `*` and brackets."""
    plain = arithmetic.replace(",", "")
    assert re.fullmatch(r"[\d\s+*()]+", plain), arithmetic
    return int(eval(plain))


@pytest.mark.parametrize("heading", ["part", "first_block_backward", "forward_end"])
def test_the_hand_arithmetic_adds_up(heading: str) -> None:
    for name, (arithmetic, number) in hand_table(heading).items():
        assert worked_out(arithmetic) == number, name


def test_the_hand_ledger_is_the_tools() -> None:
    asked = {"gpus": 4, "gpu": "a100-80gb", "method": "ddp", "micro_batch": 4}
    report = estimate(model="opt-1.3b", estimator="formula", **asked)
    (method,) = report.methods
    assert hand_table("part")["P"][1] == report.model.num_parameters
    for instant in ("first_block_backward", "forward_end"):
        rows = {name: number for name, (_, number) in hand_table(instant).items()}
        total = rows.pop("total")
        assert rows == {str(term): cell for term, cell in method.ledger[instant].items()}
        assert total == sum(rows.values())
    assert method.peak_instant == "first_block_backward"
    for number in (
        method.peak_bytes.allocated,
        method.peak_bytes.reserved,
        method.peak_bytes.device,
        method.upper_bytes.device,
    ):
        assert f"{number:,}" in FORMULA
