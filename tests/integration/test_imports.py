"""What each layer imports, read from its code and seen in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "mlflow",
    "sklearn",
    "lightgbm",
    "pandas",
    "matplotlib",
    "numpy",
}
LIGHT = ("units", "errors", "spec", "record", "architecture", "memory", "plan")
BELOW = {
    "errors": set(),
    "units": set(),
    "spec": {"errors", "units"},
    "record": {"errors", "units"},
    "architecture": {"spec", "errors", "units"},
    "memory": {"architecture", "spec", "errors", "units"},
    "plan": {"measure", "memory", "architecture", "record", "spec", "errors", "units"},
}
"""What a layer may import of the project, beside itself; import-linter keeps torch out of it."""

WHEN_CALLED = {"plan": {"numpy"}}
"""What a layer may import besides, in functions alone: of many layouts, and of measured times."""


def files_of(layer: str) -> list[Path]:
    package = ROOT / "src" / layer
    return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
    return frozenset(found)


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_is_below_it(layer: str) -> None:
    for path in files_of(layer):
        mine = {name.split(".")[1] for name in imports_of(path) if name.startswith("src.")}
        assert mine <= BELOW[layer] | {layer}, path.name


@pytest.mark.parametrize("layer", LIGHT)
def test_what_answers_in_microseconds_needs_the_standard_library_alone(layer: str) -> None:
    for path in files_of(layer):
        tops = {name.split(".")[0] for name in imports_of(path)} - {"src"}
        later = WHEN_CALLED.get(layer, set())
        assert tops <= sys.stdlib_module_names | later, path.name
        outside = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)
        ]
        assert not later & {alias.name for node in outside for alias in node.names}, path.name


@pytest.mark.parametrize("layer", ["spec", "record", "memory", "plan"])
def test_every_file_of_a_layer_is_imported_alone(layer: str) -> None:
    """No circle hides behind the order in which files are usually imported."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files_of(layer)
    ]
    program = f"""
import importlib, sys
for name in {names!r}:
    for loaded in [key for key in sys.modules if key.split(".")[0] == "src"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import src.estimate",
        "import src.memory, src.plan",
        "from src.estimate import estimate\n"
        "estimate(model='opt-125m', gpus=1, gpu='a100-80gb', micro_batch=1, estimator='formula')",
        "from src.estimate import run\n"
        "run(['model=opt-125m', 'gpus=2', 'gpu=a100-80gb', 'format=json', 'estimator=formula'])",
        "from src.estimate import run\nrun(['list=gpus'])",
    ],
)
def test_answering_loads_nothing_heavy(program: str) -> None:
    script = f"""
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()):
    exec({program!r})
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert not loaded & HEAVY


def test_importing_leaves_no_trace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import src.estimate"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []
