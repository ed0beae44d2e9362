"""Whatever stands in a file, it is read or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from src.config import compose_keywords
from src.config.imports import import_files
from src.config.imports.detect import FORMATS
from src.errors import UserError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "none", "true", "bf16", "full", "lora", "4", "3", "nf4", "cpu"]),
    st.lists(st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """A mark of a format and some of its keys, with any value."""
    form = draw(st.sampled_from(FORMATS))
    names = st.sampled_from([*form.rules, *sorted(form.harmless), "no_such_key"])
    found: dict[str, Any] = {}
    for name in [draw(st.sampled_from(sorted(form.marks))), *draw(st.lists(names, max_size=8))]:
        *holders, last = name.split(".")
        place = found
        for holder in holders:
            inner = place.get(holder)
            place[holder] = inner if isinstance(inner, dict) else {}
            place = place[holder]
        place[last] = draw(VALUES)
    return found


@example({"zero_optimization": {"stage": float("nan")}})
@example({"num_processes": 0, "num_machines": 3, "train_batch_size": 4})
@given(contents())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_values_are_read_or_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    file = tmp_path / "any.json"
    file.write_text(json.dumps(content))
    try:
        lines = import_files(str(file), {}).warnings
        compose_keywords({"from": str(file)})
    except UserError as error:
        lines = (str(error),)
    assert all(line.startswith("from") and "\n" not in line for line in lines)
