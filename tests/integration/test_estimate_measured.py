"""`measured=FILE`: rows and snapshots that the dry run wrote, and files that are neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.config import compose_keywords, to_request
from src.estimate import estimate
from src.estimate import run as run_estimate
from src.measure.client import case_of
from src.measure.rows import RankEnd, make_row
from src.measure.snapshot import snapshot_dict
from src.record import Outcome, Provenance, Row, add_rows
from src.spec import Layout, Method, Step
from tests.commands import run_here

ROOT = Path(__file__).resolve().parents[2]
ASKED: dict[str, Any] = {
    "model": "opt-125m",
    "arch": {"num_hidden_layers": 3},
    "gpu": "a100-80gb",
    "seq_len": 512,
    "micro_batch": 4,
}
KEYS = [
    "model=opt-125m",
    "arch.num_hidden_layers=3",
    "gpu=a100-80gb",
    "seq_len=512",
    "micro_batch=4",
]


def step(**changes: Any) -> Step:
    request = to_request(compose_keywords({**ASKED, **changes})).request
    assert request.micro_batch is not None
    return Step(
        job=request.job,
        method=Method.SINGLE,
        layout=Layout(),
        gpu=request.cluster.gpu,
        micro_batch=request.micro_batch,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`rows.jsonl` of two dry runs, `snapshot.json` of the first, and what is none of both."""
    from src.measure import timeline
    from src.measure.worker import answer

    target = tmp_path_factory.mktemp("measured")
    rows: list[Row] = []
    for changes in ({}, {"checkpointing": "none"}):
        case = json.loads(json.dumps(case_of(step(**changes))))
        provenance = Provenance(campaign="dry", started="2026-01-02T03:04:05+00:00", duration_s=1.0)
        end = RankEnd(outcome=Outcome.OK, answer=answer(case))
        rows.append(make_row(case, [end], provenance))
    add_rows(target / "rows.jsonl", rows)
    (target / "row.json").write_text(json.dumps(rows[0].to_json(), indent=2))

    def write(path: Path, **what: Any) -> None:
        path.with_suffix(".json").write_text(json.dumps(snapshot_dict(**what)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "write_snapshot", write)
        case = json.loads(json.dumps(case_of(step())))
        answer({**case, "snapshot": str(target / "snapshot.pickle")})
    _write_wrong(target, rows[0])
    return target


def _write_wrong(target: Path, row: Row) -> None:
    good = json.dumps(row.to_json())
    files = {
        "empty.json": "",
        "blank.jsonl": "\n \n",
        "foreign.json": '{"loss": 1.5}',
        "list.json": "[1, 2]",
        "number.json": "7",
        "text.jsonl": "epoch 1\nepoch 2\n",
        "cut.jsonl": good[:-40],
        "deep.json": "[" * 100_000,
        "version.json": good.replace('"schema_version": 1', '"schema_version": 9'),
        "changed.json": good.replace('"micro_batch": 4', '"micro_batch": 3'),
        "nan.json": good.replace('"duration_s": 1.0', '"duration_s": NaN'),
        "form.json": '{"segments": [], "device_traces": [[{"action": "alloc"}]]}',
        "nothing.json": '{"segments": [], "device_traces": []}',
    }
    for name, text in files.items():
        (target / name).write_text(text)
    (target / "pickled.json").write_bytes(b"\x80\x04K\x01.")
    (target / "snap.pickle").write_bytes(b"\x80\x04K\x01.")
    (target / "archive.json").write_bytes(b"PK\x03\x04")
    (target / "binary.json").write_bytes(b"\xff\xfe\x00")
    (target / "damaged.jsonl").write_text(f"{good}\n{good[:30]}\n")


def answered(folder: Path, file: str, *more: str) -> dict[str, Any]:
    done = run_here(
        run_estimate, folder, *KEYS, "estimator=formula", *more, f"measured={file}", "format=json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["measured"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.jsonl:1", "row.json", "damaged.jsonl"])
def test_a_dry_runs_row_against_the_formula(folder: Path, file: str) -> None:
    gap = answered(folder, file)
    assert (gap["kind"], gap["source"], gap["outcome"]) == ("row", "simulated", "ok")
    assert gap["settings"] == []
    level = gap["levels"]["allocated"]
    assert abs(level["gap_bytes"]) < 0.002 * level["measured_bytes"]
    assert level["gap_bytes"] == level["left_bytes"]
    assert sum(part["measured_bytes"] for part in gap["parts"]) == level["measured_bytes"]
    assert gap["unattributed_bytes"] == 0
    assert {part["part"] for part in gap["parts"]} >= {"weights", "optimizer states"}


def test_against_the_dry_run_itself_there_is_no_gap(folder: Path) -> None:
    report = estimate(**ASKED, estimator="dryrun", measured=folder / "rows.jsonl")
    gap = report.measured
    assert gap is not None
    assert [level.gap_bytes for level in gap.levels] == [0, 0, 0]
    assert [part.gap_bytes for part in gap.parts] == [0] * len(gap.parts)
    assert {one.estimate_bytes for one in gap.instants} == {
        one.measured_bytes for one in gap.instants
    }


def test_a_row_of_another_setting_names_it(folder: Path) -> None:
    gap = answered(folder, "rows.jsonl:2")
    assert [setting["key"] for setting in gap["settings"]] == ["checkpointing"]
    setting = gap["settings"][0]
    assert (setting["asked"], setting["measured"]) == ("full", "none")
    level = gap["levels"]["allocated"]
    assert setting["moved_bytes"]["allocated"] == level["settled_bytes"] - level["estimate_bytes"]
    assert abs(level["left_bytes"]) < 0.002 * level["measured_bytes"]
    row_id = gap["id"]
    assert answered(folder, f"rows.jsonl:{row_id}") == {**gap, "file": f"rows.jsonl:{row_id}"}


def test_a_snapshot_of_the_dry_run(folder: Path) -> None:
    rows = answered(folder, "rows.jsonl:1")
    gap = answered(folder, "snapshot.json")
    assert (gap["kind"], gap["source"], gap["id"]) == ("snapshot", "recorded", "0")
    for level in ("allocated", "reserved"):
        assert gap["levels"][level]["measured_bytes"] == rows["levels"][level]["measured_bytes"]
    assert gap["levels"]["device"]["measured_bytes"] is None
    assert gap["unattributed_bytes"] == 0
    mine = {part["part"]: part["measured_bytes"] for part in gap["parts"]}
    assert mine == {part["part"]: part["measured_bytes"] for part in rows["parts"]}


def test_a_bare_snapshot_leaves_the_rest_open(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "snapshot.json").read_text())
    for entry in content["device_traces"][0]:
        entry.pop("category")
        entry.pop("frames")
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block.pop("frames")
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(content))
    gap, named = answered(tmp_path, str(bare)), answered(folder, "snapshot.json")
    mine, owned = (
        {part["part"]: part["measured_bytes"] for part in each["parts"]} for each in (gap, named)
    )
    for part in ("weights", "optimizer states", "logits and loss", "workspaces"):
        assert mine[part] == pytest.approx(owned[part], rel=0.01), part
    assert gap["unattributed_bytes"] > 0
    total = sum(mine.values()) + gap["unattributed_bytes"]
    assert total == gap["levels"]["allocated"]["measured_bytes"]


def test_the_table_and_the_page_tell_it(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run_here(
        run_estimate,
        folder,
        *KEYS,
        "estimator=formula",
        "measured=rows.jsonl:2",
        f"report={page}",
    )
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, page.read_text("utf-8")):
        for words in ("Why off", "checkpointing", "fragmentation", "logits and loss"):
            assert words in text
    assert not any(line.rstrip() != line for line in done.stdout.splitlines())


WRONG = [
    ("snap.pickle", "a pickle"),
    ("pickled.json", "json.dump"),
    ("archive.json", "a pickle"),
    ("missing.json", "No such file"),
    ("missing.json:3", "No such file"),
    (".", "not a folder"),
    ("empty.json", "is empty"),
    ("blank.jsonl", "is empty"),
    ("foreign.json", "neither a row"),
    ("list.json", "neither a row"),
    ("number.json", "neither a row"),
    ("text.jsonl", "line 1 is no JSON"),
    ("cut.jsonl", "line 1 is no JSON"),
    ("deep.json", "neither"),
    ("binary.json", "neither"),
    ("version.json", "unknown schema version 9"),
    ("changed.json", "is not the hash"),
    ("nan.json", "duration_s"),
    ("form.json", "not of the form"),
    ("nothing.json", "GPUs with bytes: none"),
    ("snapshot.json:4", "GPUs with bytes: 0"),
    ("snapshot.json:first", "number of a GPU"),
    ("rows.jsonl:9", "0 rows are 9"),
    ("rows.jsonl:abc", "0 rows are abc"),
]


@pytest.mark.parametrize(("file", "said"), WRONG, ids=[file for file, _ in WRONG])
def test_wrong_files_are_one_line(folder: Path, file: str, said: str) -> None:
    before = sorted(folder.iterdir())
    done = run_here(run_estimate, folder, *KEYS, f"measured={file}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"measured={file}: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["format=csv"], "format=table or json"),
        (["solve=seq_len"], "not with solve"),
        (["layouts=pareto"], "without layouts"),
        (["micro_batch=5"], "none of its 2 rows is of this job"),
    ],
)
def test_what_cannot_be_asked_with_it(folder: Path, more: list[str], said: str) -> None:
    keys = [key for key in KEYS if not key.startswith("micro_batch")]
    done = run_here(run_estimate, folder, *keys, *more, "measured=rows.jsonl")
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_heavy_is_loaded(folder: Path) -> None:
    heavy = ("torch", "transformers", "mlflow", "sklearn", "lightgbm", "pandas", "numpy")
    files = ", ".join(repr(str(folder / name)) for name in ("row.json", "snapshot.json"))
    program = (
        "import sys; from src.estimate import estimate\n"
        f"for file in ({files}):\n"
        f"    estimate(**{ASKED!r}, estimator='formula', measured=file)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
