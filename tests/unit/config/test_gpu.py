from __future__ import annotations

import os
from pathlib import Path

import pytest

from src.config import gpu as module
from src.config.gpu import resolve_gpu
from src.errors import UserError


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRIVER_FOLDER", tmp_path / "driver")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def put_driver_file(tmp_path: Path, *names: str) -> None:
    for index, name in enumerate(names):
        folder = tmp_path / "driver" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 1\n")


def put_smi(tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)


@pytest.mark.parametrize("written", ["v100-16gb", "V100", "Tesla V100-SXM2-16GB"])
def test_any_name_finds_the_gpu(written: str) -> None:
    gpu, warnings = resolve_gpu(written)
    assert (gpu.sku, warnings) == ("v100-16gb", ())


def test_auto_without_a_gpu_says_what_is_assumed() -> None:
    gpu, warnings = resolve_gpu("auto")
    assert gpu.sku == "a100-80gb"
    assert warnings == ("gpu=auto: no NVIDIA GPU in this machine; a100-80gb is assumed",)


def test_auto_reads_the_drivers_files(tmp_path: Path) -> None:
    put_driver_file(tmp_path, "NVIDIA H200", "NVIDIA H200")
    gpu, warnings = resolve_gpu("AUTO")
    assert (gpu.sku, warnings) == ("h200", ())


def test_auto_asks_nvidia_smi(tmp_path: Path) -> None:
    put_smi(tmp_path, "echo Tesla T4; echo Tesla T4")
    assert resolve_gpu("auto")[0].sku == "t4"


@pytest.mark.parametrize("script", ["exit 9", "echo", "kill -9 $$"])
def test_a_broken_nvidia_smi_is_no_gpu(tmp_path: Path, script: str) -> None:
    put_smi(tmp_path, script)
    assert "no NVIDIA GPU" in resolve_gpu("auto")[1][0]


def test_auto_with_an_unknown_gpu_says_so(tmp_path: Path) -> None:
    put_driver_file(tmp_path, "NVIDIA Z9")
    gpu, (warning,) = resolve_gpu("auto")
    assert gpu.sku == "a100-80gb"
    assert "NVIDIA Z9" in warning


def test_auto_with_different_gpus_says_so(tmp_path: Path) -> None:
    put_driver_file(tmp_path, "Tesla T4", "NVIDIA H200")
    gpu, (warning,) = resolve_gpu("auto")
    assert gpu.sku == "t4"
    assert "different GPUs" in warning


def test_an_unreadable_file_of_the_driver_is_skipped(tmp_path: Path) -> None:
    put_driver_file(tmp_path, "Tesla T4", "NVIDIA H200")
    first = tmp_path / "driver" / "0000:00:00.0" / "information"
    first.unlink()
    os.symlink("loop", first)
    assert resolve_gpu("auto")[0].sku == "h200"


def test_a_number_asks_for_gpus() -> None:
    with pytest.raises(UserError, match=r"gpu=4: .*did you mean gpus=4\?"):
        resolve_gpu("4")


def test_an_unknown_gpu_gets_the_nearest_names() -> None:
    with pytest.raises(UserError, match="gpu=h100-90gb: not among the known GPUs; nearest: h100"):
        resolve_gpu("h100-90gb")
