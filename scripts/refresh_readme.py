"""Write what the program prints into README.md, and draw docs/ledger.png.

    python scripts/refresh_readme.py

Replaces what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`; the rest is written by
hand. `python -m tests.matrix` comes first where the formula has changed: its summary is copied.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MAIN_ARGUMENTS = ("model=opt-1.3b", "gpus=4")
PICTURE_ARGUMENTS = (
    "model=opt-1.3b",
    "gpus=4",
    "gpu=v100-16gb",
    "precision=fp16-mixed",
    "micro_batch=16",
    "method=[ddp,zero2,fsdp,tp]",
    "estimator=formula",
    "plot=docs/ledger.png",
)
_HELP_LINE = re.compile(r"^  ([a-z_.0-9]+) +(.*?)(?: \[((?:[^\[\]]|\[\])*)\])?$")


def estimate(*arguments: str) -> str:
    """What `python -m src.estimate ARGUMENTS` prints on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "src.estimate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def main_output() -> str:
    """The main command's answer, as a fenced block."""
    return f"```text\n{estimate(*MAIN_ARGUMENTS).rstrip()}\n```"


def keys() -> str:
    """Every key as a row of a table, from `--help`."""
    rows = ["| key | values, meaning | default |", "|---|---|---|"]
    lines = re.sub(r"\n {20}", " ", estimate("--help")).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("Keys"))
    for line in lines[first + 1 :]:
        found = _HELP_LINE.match(line)
        if found is None:
            break
        name, words, default = found.groups()
        shown = "" if default is None else f"`{default}`"
        rows.append(f"| `{name}` | {words.replace(' | ', ', ').replace('|', ' ')} | {shown} |")
    return "\n".join(rows)


def matrix() -> str:
    """The summary of docs/accuracy.md."""
    text = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    found = re.search(r"^`python -m tests\.matrix.*?`: (\d+ specs.*?families)", text, re.MULTILINE)
    summary = re.search(r"^Median .*$", text, re.MULTILINE)
    assert found is not None, "run python -m tests.matrix"
    assert summary is not None, "run python -m tests.matrix"
    head = f"Formula against the dry run, {found.group(1)} (`python -m tests.matrix`): "
    return head + summary.group(0)[0].lower() + summary.group(0)[1:]


SECTIONS: dict[str, Callable[[], str]] = {
    "main output": main_output,
    "keys": keys,
    "matrix": matrix,
}


def with_section(text: str, name: str, content: str) -> str:
    """The text with a section's content replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin, 1)
    tail = rest.split(end, 1)[1]
    return f"{head}{begin}\n{content}\n{end}{tail}"


def section(text: str, name: str) -> str:
    """A section's content as it stands in the text."""
    head = text.split(f"<!-- {name}: begin -->\n", 1)[1]
    return head.split(f"\n<!-- {name}: end -->", 1)[0]


def main() -> int:
    """Refresh everything; the exit code."""
    text = README.read_text("utf-8")
    for name, content in SECTIONS.items():
        text = with_section(text, name, content())
    README.write_text(text, "utf-8")
    estimate(*PICTURE_ARGUMENTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
