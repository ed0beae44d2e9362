from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest

from src.errors import UserError
from src.plan.result import Report
from src.report import write_plot
from src.units import GIB, Levels


def test_png_opens(report_of_any_size: Report, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    write_plot(report_of_any_size, path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert height > 300
    assert width > 300
    assert [file.name for file in tmp_path.iterdir()] == ["out.png"]


def test_svg_names_terms_methods_and_instants(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "out.SVG"
    write_plot(report, path)
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    for word in ("weights", "logits", "gradients", "usable capacity", "forward end", "test-40gb"):
        assert word in text
    assert "never" not in text
    for method in report.methods:
        assert method.method in text


def test_two_runs_write_the_same_bytes(report: Report, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        write_plot(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_peak_far_beyond_the_card_is_told_as_a_number(tmp_path: Path, report: Report) -> None:
    huge = Levels(allocated=800 * GIB, reserved=801 * GIB, device=802 * GIB)
    first = replace(report.methods[0], peak_bytes=huge, upper_bytes=huge)
    path = tmp_path / "out.svg"
    write_plot(replace(report, methods=(first, *report.methods[1:])), path)
    assert "802 GiB" in " ".join(ElementTree.parse(path).getroot().itertext())


def test_pdf(report: Report, tmp_path: Path) -> None:
    write_plot(report, tmp_path / "out.pdf")
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF")


def test_an_unwritable_place_is_one_line(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "out.png"
    with pytest.raises(UserError, match=r"plot=.*out\.png: cannot be written"):
        write_plot(report, path)


def test_no_method_at_all_still_draws(nothing_fits: Report, tmp_path: Path) -> None:
    write_plot(nothing_fits, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000
