"""The HTML page: everything in one file, whatever came from a config escaped, readable anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from src.errors import UserError
from src.estimate import estimate
from src.plan.gap.result import Cause, Gap, InstantGap, Kind, PartGap, SettingGap
from src.plan.result import Report
from src.report.page import render_page, write_page
from src.report.page.pictures import color
from src.report.words import gib

VOID = {"meta", "rect", "circle", "line", "polygon"}


class Reader(HTMLParser):
    """Collects tags and text, and checks that they are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID or tag in ("rect", "circle", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def answer() -> Report:
    return estimate(model="opt-1.3b", gpus=4, gpu="v100-16gb", precision="fp16-mixed")


def test_the_page_is_whole_and_needs_nothing_else(answer: Report) -> None:
    text = render_page(answer)
    reader = read(text)
    assert reader.open == []
    assert reader.links == []
    assert "script" not in reader.tags
    assert not re.search(r"https?://|url\(|@import", text)


def test_every_method_the_ledger_and_the_warnings_are_there(answer: Report) -> None:
    text = read(render_page(answer)).text
    for row in answer.methods:
        assert row.method.value in text
        assert gib(row.upper_bytes.device) in text
    assert answer.recommended is not None
    assert answer.recommended.reason in text
    for warning in answer.warnings:
        assert warning in text
    for advice in answer.advice:
        assert advice.changes in text
    peak = answer.methods[0].ledger[answer.methods[0].peak_instant]
    for term, size in peak.items():
        assert f"{answer.methods[0].peak_instant}: {term} {gib(size)} GiB" in text


def test_whatever_came_from_a_config_is_text(answer: Report) -> None:
    evil = "<script>alert('x')</script>\"&"
    named = replace(answer, model=replace(answer.model, name=evil), warnings=(evil,))
    text = render_page(named)
    reader = read(text)
    assert "script" not in reader.tags
    assert evil in reader.text


def test_where_nothing_fits_the_page_says_so() -> None:
    report = estimate(model="llama-2-70b", gpus=1, gpu="t4")
    reader = read(render_page(report))
    assert reader.open == []
    assert "Nothing fits" in reader.text


def test_no_colour_comes_twice() -> None:
    assert len({color(place) for place in range(24)}) == 24


def test_a_page_appears_at_once_or_not_at_all(answer: Report, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="report="):
        write_page(answer, tmp_path / "missing" / "page.html")
    file = tmp_path / "page.html"
    write_page(answer, file)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_chromium_shows_it_without_overflow(
    answer: Report, tmp_path: Path, width: int, dark: bool
) -> None:
    """A probe in a copy of the page tells its width and background."""
    file = tmp_path / "page.html"
    write_page(answer, file)
    probe = (
        "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth + ' ' + "
        "getComputedStyle(document.body).backgroundColor</script></body>"
    )
    file.write_text(file.read_text("utf-8").replace("</body>", probe), "utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'profile'}"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<title>(\d+) (\d+) (rgb[^<]*)</title>", done.stdout)
    assert found is not None
    assert int(found.group(1)) <= int(found.group(2))
    assert found.group(3) == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_what_a_row_says_is_escaped_too(answer: Report) -> None:
    evil = "<script>alert(1)</script>"
    setting = SettingGap(key=evil, asked=evil, measured=evil, moved_bytes=None)
    shown = answer.methods[0]
    gap = Gap(
        file=evil,
        kind=Kind.ROW,
        id=evil,
        source=evil,
        outcome="ok",
        method=shown.method,
        layout=shown.layout,
        micro_batch=1,
        levels=(),
        settings=(setting,),
        instants=(InstantGap(instant=evil, estimate_bytes=None, measured_bytes=1),),
        instant=evil,
        parts=(PartGap(part=evil, terms={evil: 1}, measured_bytes=None),),
        unattributed_bytes=None,
        causes=(Cause(kind=evil, gap_bytes=1, words=evil),),
        versions={evil: evil},
    )
    page = read(render_page(replace(answer, measured=gap)))
    assert "script" not in page.tags
    assert page.text.count(evil) >= 12
    assert not page.open
    assert "Why off" not in read(render_page(answer)).text
