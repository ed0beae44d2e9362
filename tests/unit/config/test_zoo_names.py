from __future__ import annotations

import pytest

from src.config import zoo


@pytest.mark.parametrize(
    ("kind", "written", "name"),
    [
        ("gpu", "rtx4090", "rtx-4090"),
        ("gpu", "RTX_4090", "rtx-4090"),
        ("gpu", "a100 80gb", "a100-80gb"),
        ("model", "OPT1.3B", "opt-1.3b"),
        ("model", "llama3-8b", "llama-3-8b"),
    ],
)
def test_dashes_and_case_do_not_matter(kind: str, written: str, name: str) -> None:
    assert zoo.find(kind, written) == name


@pytest.mark.parametrize("kind", ["gpu", "model"])
def test_every_name_still_finds_its_own_entry(kind: str) -> None:
    for name, others in zoo.index(kind).items():
        assert {zoo.find(kind, written) for written in (name, *others)} == {name}


def test_nothing_is_guessed() -> None:
    assert zoo.find("gpu", "rtx") is None
    assert zoo.find("model", "-") is None
