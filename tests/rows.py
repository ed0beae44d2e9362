"""Rows for tests: one of each source, and any row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from src.record import LEVELS, Outcome, Provenance, Rank, Row, Source

GIB = 2**30
CASE: dict[str, Any] = {
    "device": "simulated",
    "model": {"name": "tiny", "hf_id": None, "config": {"model_type": "gpt2", "n_layer": 2}},
    "method": "fsdp",
    "layout": {"dp": 2, "tp": 1, "shard": 2},
    "gpu": {"sku": "a100-80gb", "usable_gib": 79.15},
    "micro_batch": 4,
}
PROVENANCE = Provenance(
    campaign="smoke", started="2026-01-02T03:04:05+00:00", duration_s=1.5, git_commit="abc"
)
SIMULATED = Row(
    case=CASE,
    outcome=Outcome.OK,
    source=Source.SIMULATED,
    provenance=PROVENANCE,
    peak_bytes={"allocated": 10 * GIB, "reserved": 12 * GIB, "device": 13 * GIB},
    peak_instant="loss_backward",
    instants={"forward_end": {"allocated": 9 * GIB}, "loss_backward": {"allocated": 10 * GIB}},
    ledger={"loss_backward": {"weights": 4 * GIB, "logits": 6 * GIB}},
    numbers={"num_alloc_retries": 0, "after_step_bytes": 3 * GIB},
    environment={"gpu": "a100-80gb"},
    versions={"torch": "2.13.0"},
    notes=("something assumed",),
)
MEASURED = replace(
    SIMULATED,
    case=CASE | {"device": "cuda"},
    source=Source.MEASURED,
    comm="nccl",
    ledger={},
    fullest_rank=1,
    ranks=tuple(
        Rank(rank=rank, outcome=Outcome.OK, peak_bytes={"allocated": (9 + rank) * GIB})
        for rank in range(2)
    ),
)
PUBLISHED = replace(
    SIMULATED,
    source=Source.PUBLISHED,
    provenance=replace(PROVENANCE, url="https://example.org/bytes.csv"),
)

_NAMES = st.text(min_size=1, max_size=8)
_BYTES = st.integers(min_value=0, max_value=2**45)
_LEVELS = st.dictionaries(st.sampled_from(LEVELS), _BYTES)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=6,
)
_OBJECTS = st.dictionaries(_NAMES, _JSON, max_size=4)

any_row = st.builds(
    Row,
    case=_OBJECTS.map(lambda more: {**more, "device": "cuda"}),
    outcome=st.sampled_from(Outcome),
    source=st.just(Source.MEASURED),
    provenance=st.builds(
        Provenance,
        campaign=_NAMES,
        started=st.datetimes(timezones=st.timezones()).map(lambda moment: moment.isoformat()),
        duration_s=st.floats(min_value=0, max_value=1e6),
        git_commit=st.none() | _NAMES,
        url=st.none() | _NAMES,
    ),
    comm=st.sampled_from(["none", "fake", "nccl"]),
    peak_bytes=_LEVELS,
    peak_instant=st.none() | _NAMES,
    instants=st.dictionaries(_NAMES, _LEVELS, max_size=3),
    ledger=st.dictionaries(_NAMES, st.dictionaries(_NAMES, _BYTES, max_size=3), max_size=3),
    numbers=st.dictionaries(_NAMES, _BYTES | st.floats(min_value=0, max_value=1e12), max_size=4),
    oom_instant=st.none() | _NAMES,
    message=st.none() | _NAMES,
    fullest_rank=st.integers(min_value=0, max_value=1000),
    ranks=st.lists(
        st.builds(
            Rank,
            rank=st.integers(min_value=0, max_value=1000),
            outcome=st.sampled_from(Outcome),
            peak_bytes=_LEVELS,
        ),
        max_size=3,
    ).map(tuple),
    environment=_OBJECTS,
    versions=st.dictionaries(_NAMES, _NAMES, max_size=3),
    notes=st.lists(_NAMES, max_size=3).map(tuple),
)
