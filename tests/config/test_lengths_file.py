from __future__ import annotations

import json
from pathlib import Path

import pytest

from src.config.lengths import resolve_seq_len
from src.errors import UserError
from src.estimate import estimate


@pytest.mark.parametrize("text", ["5\n3\n\n5\n", "5 3 5", "[5, 3, 5]", " [5,\n3,5]\n"])
def test_lines_words_and_json_mean_the_same(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    longest, lengths = resolve_seq_len(str(file))
    assert longest == 5
    assert lengths is not None
    assert lengths.counts == ((3, 1), (5, 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("[]", "it is empty"),
        ("5\n0\n", "number 2 is 0"),
        ("5\n-3\n", "number 2 is '-3'"),
        ("5,3", "number 1 is '5,3'"),
        ("[5, true]", "item 2 is True"),
        ("[5, 2.5]", "item 2 is 2.5"),
        ("[5, ", "Expecting value"),
        ("length\n5\n", "number 1 is 'length'"),
    ],
)
def test_a_wrong_file_is_one_line_that_says_where(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(UserError, match="seq_len=") as raised:
        resolve_seq_len(str(file))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_binary_or_missing_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("binary", "it is no text"), ("missing", "No such file")):
        with pytest.raises(UserError, match=reason):
            resolve_seq_len(str(tmp_path / name))


def test_the_answer_is_planned_for_the_longest(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([64] * 30 + [256]))
    report = estimate(model="opt-125m", seq_len=str(file), micro_batch=2)
    plain = estimate(model="opt-125m", seq_len=256, micro_batch=2)
    assert report.request.job.seq_len == 256
    assert report.methods[0].peak_bytes == plain.methods[0].peak_bytes
    assert report.methods[0].expected_bytes is not None
