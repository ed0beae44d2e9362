from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest

from src.errors import UserError
from src.measure.events import Instant, Owner
from src.measure.timeline import Moment, Timeline
from src.plan.result import Report
from src.report import write_plot
from src.units import GIB

INSTANTS = [instant for instant in Instant if instant is not Instant.LOAD]


def make_timeline(gib: float) -> Timeline:
    moments = [
        Moment(
            index=index,
            instant=INSTANTS[index * len(INSTANTS) // 70],
            num_bytes=(GIB, round(index % 7 * gib / 7 * GIB)),
        )
        for index in range(70)
    ]
    return Timeline(owners=(Owner.WEIGHTS, Owner.SAVED_ACTIVATIONS), moments=tuple(moments))


@pytest.mark.parametrize("gib", [1.0, 30.0, 200.0])
def test_a_picture_opens(report: Report, tmp_path: Path, gib: float) -> None:
    write_plot(report, tmp_path / "out.png", make_timeline(gib))
    height, width, _ = matplotlib.image.imread(tmp_path / "out.png").shape
    assert min(height, width) > 300
    assert [file.name for file in tmp_path.iterdir()] == ["out.png"]


def test_it_names_owners_instants_capacity_and_that_it_is_simulated(
    report: Report, tmp_path: Path
) -> None:
    for name in ("a.svg", "b.svg"):
        write_plot(report, tmp_path / name, make_timeline(30.0))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    words = " ".join(" ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext()).split())
    for word in ("weights", "saved activations", "usable 39.50 GiB", "simulated", "test-40gb"):
        assert word in words
    for instant in INSTANTS:
        assert instant.value.rsplit("_", 1)[0].replace("_", " ") in words


def test_a_capacity_far_above_is_told_in_words(report: Report, tmp_path: Path) -> None:
    write_plot(report, tmp_path / "a.svg", make_timeline(2.0))
    words = " ".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "usable 39.50 GiB (above)" in words


def test_a_missing_folder_is_one_line(report: Report, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plot=.*cannot be written"):
        write_plot(report, tmp_path / "no" / "a.png", make_timeline(1.0))
