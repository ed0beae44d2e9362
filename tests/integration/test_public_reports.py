"""What people reported of their own fine-tuning runs, against the formula's verdict and bytes."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest

from src.errors import NotCoveredError
from src.estimate import estimate
from src.plan.result import MethodReport
from src.spec import Verdict
from tests.public_reports import CLAIMS, NOT_ASKED, OUT_OF_SCOPE, UNEXPLAINED
from tests.report_claims import Claim, Happened

REPORTS = Path(__file__).parents[3] / "shared" / "reports" / "oom.csv"
NEAR = 0.10

here = pytest.mark.skipif(not REPORTS.exists(), reason="the public reports are not here")


def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(REPORTS.read_text().splitlines()))


def answers(claim: Claim) -> list[MethodReport]:
    """One per combination of what the report leaves open."""
    found = []
    for request in claim.requests():
        try:
            (row,) = estimate(**request).methods
        except NotCoveredError as error:
            pytest.skip(str(error))
        found.append(row)
    return found


def name(claim: Claim) -> str:
    batch = claim.keys.get("micro_batch", "any")
    return f"{claim.report}-{claim.happened.name.lower()}-{batch}"


def holds(claim: Claim, agrees: Iterable[bool]) -> bool:
    return all(agrees) if claim.decided else any(agrees)


def shown(found: list[MethodReport]) -> list[str]:
    return [f"{row.verdict} {row.peak_bytes} {row.peak_instant}" for row in found]


@pytest.mark.parametrize("claim", CLAIMS, ids=name)
def test_the_verdict_is_what_happened(claim: Claim) -> None:
    """Out of memory is never `fits`; what ran is never `oom`."""
    found = answers(claim)
    wrong = Verdict.FITS if claim.happened is Happened.OOM else Verdict.OOM
    assert holds(claim, [row.verdict is not wrong for row in found]), shown(found)


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.number], ids=name)
def test_the_bytes_are_near(claim: Claim) -> None:
    found = answers(claim)
    assert claim.number is not None
    level, said = claim.number.level, claim.number.bytes
    errors = [getattr(row.peak_bytes, level) / said - 1 for row in found]
    assert holds(claim, [abs(error) <= NEAR for error in errors]), (errors, shown(found))


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.host_bytes], ids=name)
def test_host_memory_that_did_not_suffice(claim: Claim) -> None:
    assert claim.host_bytes is not None
    for row in answers(claim):
        assert row.host_bytes is not None
        assert row.host_bytes * row.layout.num_gpus > claim.host_bytes


@here
def test_every_strong_report_is_asked_or_has_its_reason() -> None:
    strong = {row["id"] for row in rows() if row["strength"] in "AB"}
    asked = {claim.report for claim in CLAIMS}
    listed = set(OUT_OF_SCOPE) | set(UNEXPLAINED)
    assert asked | listed == strong
    assert not asked & listed
    assert {report for report, _ in NOT_ASKED} <= asked


@here
def test_every_verdict_of_a_report_is_asked_or_has_its_reason() -> None:
    """A report that tells of both outcomes is asked for both."""
    excused = {report for report, _ in NOT_ASKED}
    for row in rows():
        mine = {claim.happened for claim in CLAIMS if claim.report == row["id"]}
        words = row["verdict_expected"].split()
        told = {Happened.OOM} if "OOM" in words else set()
        told |= {Happened.RAN} if "FITS" in words else set()
        if mine and row["id"] not in excused:
            assert told <= mine, row["id"]


@here
def test_capacities_in_error_messages_are_those_of_our_cards() -> None:
    names = {"V100-16GB": "v100-16gb", "T4-class 16GB": "t4", "L4-24GB": "l4"}
    names |= {"A100-40GB": "a100-40gb", "A100-80GB": "a100-80gb", "RTX A6000-48GB": "rtx-a6000"}
    seen = 0
    for row in rows():
        if row["capacity_GiB_in_message"] and row["gpu"] in names:
            seen += 1
            gpu = estimate(model="opt-125m", gpu=names[row["gpu"]], estimator="formula").gpu
            assert gpu.usable_gib == pytest.approx(float(row["capacity_GiB_in_message"]), rel=0.005)
    assert seen >= 5
