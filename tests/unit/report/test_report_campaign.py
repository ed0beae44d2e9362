"""A campaign in words and pictures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from src.errors import UserError
from src.record import Outcome, Row
from src.report.campaign import render_summary, row_text, write_cases
from src.report.campaign_progress import campaign_progress
from src.report.plot_row import draw_row
from tests.rows import CASE, GIB, MEASURED, SIMULATED

OOM = replace(
    SIMULATED,
    outcome=Outcome.OOM,
    message="CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of",
)


def test_a_row_is_told_with_its_bytes_or_its_message() -> None:
    words = "tiny fsdp dp2 seq 512 batch 4"
    assert row_text(SIMULATED) == f"{words}: ok, 13.00 GiB device (simulated)"
    assert row_text(MEASURED) == f"{words}: ok, 13.00 GiB device (measured)"
    assert row_text(OOM) == f"{words}: oom, CUDA out of memory. Tried to allocate 3.00 GiB."
    assert row_text(replace(SIMULATED, outcome=Outcome.INVALID)) == f"{words}: invalid"


def test_a_summary_counts_outcomes_and_says_what_is_left() -> None:
    rows = [SIMULATED, OOM, OOM]
    text = render_summary(rows, total=5, file=Path("rows.jsonl"), store="sqlite:///m.db")
    assert text.splitlines() == [
        "3 of 5 cases have a row (simulated): 1 ok, 2 oom",
        "rows: rows.jsonl",
        "runs: sqlite:///m.db",
        "2 cases are left; the same command goes on with them",
    ]
    whole = render_summary(rows, total=3, file=Path("rows.jsonl"), store="sqlite:///m.db")
    assert "left" not in whole


def test_progress_is_a_line_a_row_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with campaign_progress(5, done=2) as tell:
        tell(SIMULATED)
        tell(OOM)
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert captured.out == ""
    assert first.startswith("[3/5, ends ")
    assert second.startswith("[4/5, ends ")
    assert second.endswith(row_text(OOM))


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with campaign_progress(5, done=2) as tell:
        tell(SIMULATED)
    assert "3/5" in terminal.getvalue()
    assert "ends " in terminal.getvalue()
    assert row_text(SIMULATED) in terminal.getvalue()


@pytest.mark.parametrize(
    ("row", "label"), [(SIMULATED, "logits"), (MEASURED, "allocated")], ids=["owners", "levels"]
)
def test_the_picture_shows_every_instant_against_the_card(row: Row, label: str) -> None:
    figure = draw_row(row)
    assert figure is not None
    (panel,) = figure.axes
    assert len(panel.get_xticks()) == len(row.instants)
    labels = [each.get_text() for each in figure.legends[0].get_texts()]
    assert {label, "usable"} <= set(labels)
    heights = [bar.get_y() + bar.get_height() for bar in panel.patches]
    assert max(heights) == pytest.approx(max(row.instants["loss_backward"].values()) / GIB)


def test_a_row_without_bytes_has_no_picture() -> None:
    assert draw_row(replace(SIMULATED, instants={}, ledger={})) is None


def test_cases_are_written_a_line_each(tmp_path: Path) -> None:
    write_cases([CASE, CASE], tmp_path / "cases.jsonl")
    assert (tmp_path / "cases.jsonl").read_text().count("\n") == 2
    with pytest.raises(UserError, match=r"cases=.* cannot be written"):
        write_cases([CASE], tmp_path)
