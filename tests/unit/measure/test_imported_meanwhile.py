"""What is imported while bitsandbytes is simulated stays imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from src.measure.bitsandbytes import ADAPTERS, PACKAGE, simulated_bitsandbytes

OTHER = "colorsys"


def test_only_the_package_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's module that vanished and was kept by transformers was a second one later."""
    monkeypatch.delitem(sys.modules, OTHER, raising=False)
    before = {name: sys.modules.get(name) for name in (PACKAGE, ADAPTERS)}
    with simulated_bitsandbytes():
        importlib.import_module(OTHER)
        assert sys.modules[PACKAGE] is not before[PACKAGE]
        assert ADAPTERS in sys.modules
    assert OTHER in sys.modules
    assert {name: sys.modules.get(name) for name in before} == before


def test_it_goes_whatever_happens() -> None:
    before = sys.modules.get(PACKAGE)
    with pytest.raises(ValueError, match="within"), simulated_bitsandbytes():
        raise ValueError("within")
    assert sys.modules.get(PACKAGE) is before
