"""What a row refuses, and that the refusal names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from src.errors import UserError
from src.record import Row, Source, canonical
from tests.rows import CASE, MEASURED, PROVENANCE, PUBLISHED, SIMULATED


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        *parts, last = path.split(".")
        for part in parts:
            raw = raw[int(part)] if isinstance(raw, list) else raw[part]
        raw[last] = value

    return change


WRONG = [
    (setting("schema_version", 2), "schema_version: unknown schema version 2"),
    (setting("schema_version", True), "unknown schema version True"),
    (setting("peak_bytes.device", -1), "peak_bytes.device: -1 is no number of 0 or more"),
    (setting("peak_bytes.device", 1.5), "peak_bytes.device: 1.5 is no whole number"),
    (setting("peak_bytes.vram", 1), "peak_bytes.vram: none of allocated, reserved, device"),
    (setting("peak_bytes", []), "peak_bytes: .* is no object"),
    (setting("numbers.step_seconds", float("nan")), "numbers.step_seconds: nan is no number"),
    (setting("numbers.step_seconds", float("inf")), "numbers.step_seconds: inf is no number"),
    (setting("numbers.step_seconds", "fast"), "numbers.step_seconds: 'fast' is no number"),
    (setting("numbers.step_seconds", False), "numbers.step_seconds: False is no number"),
    (setting("case.micro_batch", float("nan")), "case.micro_batch: nan is no number"),
    (setting("case.micro_batch", 5), "case_id: .* is not the hash of what it says"),
    (setting("notes", ["other"]), "row_id: .* is not the hash of what it says"),
    (setting("notes", [1]), "notes: is no list of texts"),
    (setting("outcome", "fine"), "outcome: 'fine' is none of ok, oom, timeout, crashed, invalid"),
    (setting("provenance.started", "yesterday"), "provenance.started: 'yesterday' is no ISO 8601"),
    (setting("provenance.started", "2026-01-02"), "is no ISO 8601 time with a zone"),
    (setting("provenance.duration_s", None), "provenance.duration_s: None is no number"),
    (setting("provenance.by", "hand"), "provenance.by: no key of a row"),
    (setting("more", 1), "more: no key of a row"),
    (setting("versions.torch", 2), "versions.torch: 2 is no text"),
    (setting("ledger.load", {"weights": "big"}), "ledger.load.weights: 'big' is no number"),
    (setting("ranks.0.peak_bytes", {"device": -5}), "ranks.peak_bytes.device: -5 is no number"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_said_with_the_rows_name(
    change: Callable[[dict[str, Any]], None], said: str
) -> None:
    raw = json.loads(canonical(MEASURED.to_json()))
    change(raw)
    with pytest.raises(UserError, match=said) as caught:
        Row.from_json(raw)
    assert (caught.value.key, caught.value.value) == ("row", MEASURED.row_id)


@pytest.mark.parametrize("raw", [None, [], 3, "row"])
def test_what_is_no_object_is_no_row(raw: object) -> None:
    with pytest.raises(UserError, match="has to be a JSON object"):
        Row.from_json(raw)


def test_a_simulated_row_is_never_called_measured() -> None:
    with pytest.raises(UserError, match="source=measured: no row of device=simulated"):
        replace(SIMULATED, source=Source.MEASURED)
    with pytest.raises(UserError, match="source=simulated: no row of device=cuda"):
        replace(MEASURED, source=Source.SIMULATED)
    without_device = {key: value for key, value in CASE.items() if key != "device"}
    with pytest.raises(UserError, match="source=measured"):
        replace(SIMULATED, source=Source.MEASURED, case=without_device)


def test_what_was_published_has_an_address() -> None:
    assert Row.from_json(PUBLISHED.to_json()) == PUBLISHED
    with pytest.raises(UserError, match=r"needs provenance\.url"):
        replace(PUBLISHED, provenance=PROVENANCE)


def test_a_row_cannot_be_written_with_a_number_that_is_none() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(replace(SIMULATED, numbers={"step_seconds": float("nan")}).to_json())
