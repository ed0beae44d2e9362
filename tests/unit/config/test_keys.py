from __future__ import annotations

import pytest

from src.config import run_command
from src.config.keys import ESTIMATE, KEYS
from src.config.program import HELP_WIDTH
from src.errors import UserError


def test_help_has_one_entry_of_short_lines_per_key() -> None:
    lines = ESTIMATE.help_text({}).splitlines()
    for name in KEYS:
        assert len([line for line in lines if line.startswith(f"  {name} ")]) == 1
    assert max(map(len, lines)) <= HELP_WIDTH
    assert len([line for line in lines if line.startswith("  python -m src.estimate")]) == 3


def test_a_user_error_is_one_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise UserError(key="gpus", value="a\nb", allowed="a whole\nnumber")

    assert run_command(work) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "gpus=a b: a whole number\n")


def test_other_errors_are_not_hidden() -> None:
    def work() -> int:
        raise AssertionError("our own mistake")

    with pytest.raises(AssertionError):
        run_command(work)


def test_interrupt_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise KeyboardInterrupt

    assert run_command(work) == 130
    assert capsys.readouterr().err == ""
