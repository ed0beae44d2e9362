"""Rows come back from JSON as they were, and are named by what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.errors import UserError
from src.record import Row, canonical, case_id_of
from tests.rows import MEASURED, PUBLISHED, SIMULATED, any_row


@given(any_row)
def test_a_row_comes_back_from_its_line(row: Row) -> None:
    line = canonical(row.to_json())
    assert "\n" not in line
    again = Row.from_json(json.loads(line))
    assert again == row
    assert (again.row_id, again.case_id) == (row.row_id, row.case_id)


@given(any_row, st.data())
def test_a_row_without_one_of_its_keys_is_refused(row: Row, data: st.DataObject) -> None:
    raw = row.to_json()
    key = data.draw(st.sampled_from([name for name in raw if name != "row_id"]))
    del raw[key]
    with pytest.raises(UserError, match=f"row={row.row_id}: {key}: missing"):
        Row.from_json(raw)


@given(any_row, any_row)
def test_rows_are_equal_if_their_ids_are(left: Row, right: Row) -> None:
    assert (left == right) is (left.row_id == right.row_id)


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return value


@given(st.sampled_from([SIMULATED, MEASURED, PUBLISHED]))
def test_the_order_of_keys_names_nothing(row: Row) -> None:
    assert case_id_of(shuffled(dict(row.case))) == row.case_id
    assert Row.from_json(shuffled(row.to_json())) == row
