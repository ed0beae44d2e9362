"""A file of rows keeps them through crashes, full disks and other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from src.errors import UserError
from src.record import Row, RowFile, canonical, open_rows, read_rows
from tests.rows import CASE, SIMULATED

ROOT = Path(__file__).resolve().parents[3]


def row(number: int) -> Row:
    return replace(SIMULATED, case=CASE | {"micro_batch": number + 1})


def write(path: Path, count: int) -> list[Row]:
    rows = [row(number) for number in range(count)]
    with open_rows(path) as file:
        for each in rows:
            file.append(each)
    return rows


def test_rows_are_read_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rows.jsonl"
    rows = write(path, 3)
    assert list(read_rows(path).rows) == rows
    with open_rows(path) as file:
        assert file.rows == rows
        file.append(row(7))
    assert [found.case["micro_batch"] for found in read_rows(path).rows] == [1, 2, 3, 8]


def test_no_file_holds_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "rows.jsonl").rows == ()


def test_a_line_cut_off_anywhere_is_set_aside_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = write(path, 2)
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    aside = tmp_path / "rows.jsonl.damaged"
    for length in {*range(start, len(content), 37), start + 1, len(content) - 2}:
        path.write_bytes(content[:length])
        assert list(read_rows(path).rows) == rows[:1]
        assert len(read_rows(path).damaged) == (length > start)
        with open_rows(path) as file:
            assert (file.rows, file.damaged) == (rows[:1], ())
            file.append(rows[1])
        assert path.read_bytes() == content
        if length > start:
            assert aside.read_bytes() == content[start:length] + b"\n"
            aside.unlink()
        assert not aside.exists()


def test_a_whole_row_without_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = write(path, 2)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with open_rows(path) as file:
        assert file.rows == rows
    assert path.read_bytes() == content


@pytest.mark.parametrize("tail", [b"\0\0\0", b"\0\0\n", b"\xff\xfe\n", b"half a line\n"])
def test_what_a_power_cut_leaves_is_set_aside(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    rows = write(path, 1)
    content = path.read_bytes()
    path.write_bytes(content + tail)
    with open_rows(path) as file:
        assert file.rows == rows
    assert path.read_bytes() == content
    assert (tmp_path / "rows.jsonl.damaged").read_bytes() == tail.rstrip(b"\n") + b"\n"


def test_damage_further_up_is_reported_and_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, 3)
    lines = path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["numbers"]["after_step_bytes"] = 5
    lines[1] = json.dumps(changed)
    path.write_text("\n".join(["{", *lines]) + "\n")
    with open_rows(path) as file:
        assert [found.case["micro_batch"] for found in file.rows] == [1, 3]
        assert [damaged.line for damaged in file.damaged] == [1, 3]
        assert "no JSON" in file.damaged[0].reason
        assert "is not the hash of what it says" in file.damaged[1].reason
    assert path.read_text() == "\n".join(["{", *lines]) + "\n"


def test_only_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_rows(path), pytest.raises(UserError, match="another process"), open_rows(path):
        pass
    with open_rows(path):
        pass


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    program = (
        "import os, pathlib, signal, sys\n"
        "from src.record import open_rows\n"
        "with open_rows(pathlib.Path(sys.argv[1])):\n"
        "    print('open', flush=True)\n"
        "    signal.pause()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(UserError, match="another process"), open_rows(path):
            pass
        child.send_signal(signal.SIGKILL)
        with open_rows(path, wait_s=10) as file:
            file.append(row(0))


def test_a_full_disk_leaves_the_rows_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = write(path, 2)
    limit = len(path.read_bytes()) + 100
    program = (
        "import pathlib, resource, signal, sys\n"
        "from src.errors import UserError\n"
        "from src.record import open_rows\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with open_rows(pathlib.Path(sys.argv[1])) as file:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "    try:\n"
        "        file.append(file.rows[0])\n"
        "    except UserError as error:\n"
        "        print(error, len(file.rows))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(limit)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"rows={path}: cannot be written (File too large) 2\n"
    assert path.read_text() == "".join(canonical(each.to_json()) + "\n" for each in rows)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_takes_nothing_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    try:
        file = RowFile(path, descriptor)
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, descriptor)
        os.close(full)
        with pytest.raises(UserError, match="No space left"):
            file.append(row(0))
    finally:
        os.close(descriptor)


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for path in (tmp_path / "taken" / "rows.jsonl", tmp_path):
        with pytest.raises(UserError, match="rows="), open_rows(path):
            pass
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_no_reader_can_take_is_a_damaged_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    found = read_rows(path)
    assert found.rows == ()
    assert [bad.line for bad in found.damaged] == [1]
    assert "no JSON" in found.damaged[0].reason
