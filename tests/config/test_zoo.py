from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.config import zoo
from src.config.gpu import load_gpu
from src.config.model import resolve_model
from src.spec import Gpu

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "write_zoo.py"
CONF = ROOT / "conf"
SHARED = ROOT.parent / "shared"
GPUS = sorted(path.name.removesuffix(".yaml") for path in CONF.glob("gpu/*.yaml"))
MODELS = sorted(path.name.removesuffix(".yaml") for path in CONF.glob("model/*.yaml"))


def write_zoo(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in files}


@pytest.mark.skipif(not (SHARED / "zoo.json").is_file(), reason="the zoo's source is not here")
def test_the_script_reproduces_conf(tmp_path: Path) -> None:
    for _ in range(2):
        done = write_zoo(SHARED / "zoo.json", SHARED / "gpus.csv", tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    written = contents(tmp_path)
    assert len(written) > 100
    for folder in ("model", "gpu"):
        assert contents(tmp_path / folder) == contents(CONF / folder)
    assert written == {name: (CONF / name).read_text("utf-8") for name in written}
    assert set(written) == {
        f"{folder}/{path.name}" for folder in ("model", "gpu") for path in (CONF / folder).iterdir()
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_model_composes(name: str) -> None:
    entry = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text("utf-8"))
    model, warnings = resolve_model(name, arch={}, trust_remote_code=False)
    assert (model.name, model.hf_id, dict(model.config)) == (name, entry["hf_id"], entry["config"])
    assert warnings == ()
    assert entry["num_parameters"] > 0
    assert entry["source"]
    assert zoo.index("model")[name] == [entry["hf_id"], *entry["aliases"]]


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_composes(name: str) -> None:
    entry = yaml.safe_load((CONF / "gpu" / f"{name}.yaml").read_text("utf-8"))
    gpu = load_gpu(name)
    assert isinstance(gpu, Gpu)
    assert gpu.sku == name
    assert 5 < gpu.usable_gib < 300
    assert entry["source"]
    assert zoo.index("gpu")[name] == [entry["name"], *entry["aliases"]]


@pytest.mark.parametrize(("kind", "files"), [("model", MODELS), ("gpu", GPUS)])
def test_the_index_knows_every_file_and_no_name_twice(kind: str, files: list[str]) -> None:
    assert sorted(zoo.index(kind)) == files
    owners: dict[str, str] = {}
    for name, others in zoo.index(kind).items():
        for written in (name, *others):
            assert owners.setdefault(written.casefold(), name) == name
            assert zoo.find(kind, written) == name
            assert zoo.find(kind, written.upper()) == name


ROW: dict[str, Any] = {
    "hf_id": "someone/tiny",
    "aliases": [],
    "config": {"model_type": "gpt2"},
    "meta_params": 10,
    "source": "made up",
}
BAD_MODELS = {
    "no config": {"tiny": {**ROW, "config": None}},
    "no model type": {"tiny": {**ROW, "config": {"n_layer": 2}}},
    "missing field": {"tiny": {key: value for key, value in ROW.items() if key != "hf_id"}},
    "no count": {"tiny": {**ROW, "meta_params": None}},
    "upper case": {"Tiny": ROW},
    "slash": {"a/b": ROW},
    "name twice": {"tiny": ROW, "small": {**ROW, "hf_id": "x/y", "aliases": ["TINY"]}},
    "not an object": [ROW],
}


@pytest.mark.parametrize("zoo_content", BAD_MODELS.values(), ids=BAD_MODELS)
def test_a_bad_model_is_refused_before_anything_is_written(
    zoo_content: object, tmp_path: Path
) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps(zoo_content))
    (tmp_path / "gpus.csv").write_text("sku\n")
    done = write_zoo(tmp_path / "zoo.json", tmp_path / "gpus.csv", tmp_path / "conf")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "conf").exists()


GPU_ROW = {
    "sku": "test-1gb",
    "aliases": "test",
    "vendor_name": "Test GPU",
    "compute_capability": "8.0",
    "usable_total_gib": "1.0",
    "context_mib": "",
    "mem_bw_gbps": "100",
    "dense_bf16_tflops": "",
    "dense_fp16_tflops": "10",
    "tf32_tflops": "",
    "fp32_tflops": "5",
    "interconnect": "pcie",
    "p2p_bw_gbps": "16",
    "typical_gpus_per_node": "4",
    "sm_count": "20",
    "source": "made up",
    "usable_status": "",
    "context_status": "",
    "spec_status": "",
    "notes": "",
}


def write_gpus(path: Path, row: dict[str, str]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)


@pytest.mark.parametrize(
    "change",
    [
        {"compute_capability": "8"},
        {"compute_capability": "a.b"},
        {"usable_total_gib": ""},
        {"usable_total_gib": "-1"},
        {"dense_fp16_tflops": "many"},
        {"interconnect": "string"},
        {"sku": ""},
        {"vendor_name": ""},
    ],
    ids=str,
)
def test_a_bad_gpu_is_refused(change: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps({"tiny": ROW}))
    write_gpus(tmp_path / "gpus.csv", {**GPU_ROW, **change})
    done = write_zoo(tmp_path / "zoo.json", tmp_path / "gpus.csv", tmp_path / "conf")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_what_has_gone_from_the_zoo_goes_from_the_folder(tmp_path: Path) -> None:
    write_gpus(tmp_path / "gpus.csv", GPU_ROW)
    conf = tmp_path / "conf"
    for names in (("tiny", "small"), ("tiny",)):
        rows = {name: {**ROW, "hf_id": f"someone/{name}"} for name in names}
        (tmp_path / "zoo.json").write_text(json.dumps(rows))
        assert write_zoo(tmp_path / "zoo.json", tmp_path / "gpus.csv", conf).returncode == 0
        (conf / "model" / "mine.yaml").write_text("name: mine\n")
    names = sorted(path.name for path in (conf / "model").iterdir())
    assert names == ["index.json", "mine.yaml", "tiny.yaml"]


def test_wrong_usage_and_missing_files(tmp_path: Path) -> None:
    assert write_zoo().returncode == 1
    done = write_zoo(tmp_path / "no.json", tmp_path / "no.csv", tmp_path / "conf")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
