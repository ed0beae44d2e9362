"""The gap between an estimate and a row: settings, parts, causes, and which row is meant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from src.errors import NotCoveredError, UserError
from src.memory import estimate_step
from src.plan.compare import compare
from src.plan.gap.explain import choose, explain_row
from src.plan.gap.parts import KEPT, PARTS, WITHIN
from src.plan.gap.result import Gap
from src.plan.result import Report
from src.record import Outcome, Rank, Row
from src.spec import Method, Request, Step
from src.units import GIB
from tests.measured_rows import asked, row_of, step_of

FILE = "rows.jsonl"


def explained(request: Request, row: Row) -> Gap:
    return explain_row(compare(request), estimate_step, row, FILE)


def keys_of(gap: Gap) -> list[str]:
    return [setting.key for setting in gap.settings]


def causes_of(gap: Gap) -> dict[str, tuple[int | None, str]]:
    return {cause.kind: (cause.gap_bytes, cause.words) for cause in gap.causes}


def test_a_row_of_the_same_bytes_has_no_gap() -> None:
    request = asked()
    gap = explained(request, row_of(step_of(request)))
    assert gap.settings == ()
    assert [level.gap_bytes for level in gap.levels] == [0, 0, 0]
    assert [level.left_bytes for level in gap.levels] == [0, 0, 0]
    assert all(one.estimate_bytes == one.measured_bytes for one in gap.instants)
    assert {cause.gap_bytes for cause in gap.causes} == {0}


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("precision", {"precision": "bf16-true"}),
    ("optimizer", {"optimizer": "sgd"}),
    ("checkpointing", {"checkpointing": "none"}),
    ("checkpoint_every", {"checkpoint_every": 3}),
    ("attention", {"attention": "eager"}),
    ("loss", {"loss": "chunked"}),
    ("seq_len", {"seq_len": 1024}),
    ("grad_accum", {"grad_accum": 4}),
    ("micro_batch", {"micro_batch": 9}),
    ("activation_offload", {"activation_offload": True}),
    ("finetune", {"finetune": "lora"}),
    ("gpu", {"gpu": "t4", "precision": "bf16-mixed"}),
    ("model", {"model": "pythia-160m"}),
    ("arch.num_hidden_layers", {"arch": {"num_hidden_layers": 4}}),
]


@pytest.mark.parametrize(("key", "changes"), SETTINGS, ids=[key for key, _ in SETTINGS])
def test_the_setting_that_differs_is_named_and_explains_the_gap(
    key: str, changes: dict[str, Any]
) -> None:
    gap = explained(asked(), row_of(step_of(asked(**changes))))
    assert keys_of(gap) == [key]
    moved = gap.settings[0].moved_bytes
    assert moved is not None
    for level in gap.levels:
        assert level.gap_bytes == getattr(moved, level.level)
        assert level.left_bytes == 0


@pytest.mark.parametrize(
    ("name", "value"), [("r", 8), ("dropout", 0.1), ("targets", ["all-linear"])]
)
def test_options_of_adapters_are_told_one_by_one(name: str, value: Any) -> None:
    mine = asked(finetune="lora")
    other = asked(finetune={"kind": "lora", name: value})
    assert keys_of(explained(mine, row_of(step_of(other)))) == [f"finetune.{name}"]


def test_settings_that_move_most_come_first_and_those_unknown_last() -> None:
    other = step_of(asked(micro_batch=16, grad_accum=2, optimizer="sgd"))
    gap = explained(asked(), row_of(other, loop={"hold_outputs": True}))
    moved = [setting.moved_bytes for setting in gap.settings]
    sizes = [abs(one.device) for one in moved if one is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert gap.settings[-1].key == "loop.hold_outputs"
    assert gap.settings[-1].moved_bytes is None
    assert [setting.measured for setting in gap.settings if setting.key == "micro_batch"] == ["16"]


@pytest.mark.parametrize(
    ("method", "num_gpus", "key"),
    [(Method.DDP, 4, "method"), (Method.FSDP, 2, "gpus"), (Method.ZERO3, 4, "method")],
)
def test_methods_and_gpus(method: Method, num_gpus: int, key: str) -> None:
    mine = asked(gpus=4, method=["fsdp"])
    gap = explained(mine, row_of(step_of(mine, method, num_gpus)))
    assert keys_of(gap) == [key]
    assert [level.left_bytes for level in gap.levels] == [0, 0, 0]


def test_what_was_left_open_is_taken_from_the_row() -> None:
    mine = asked(gpus=4, method="all", micro_batch=None)
    other = replace(step_of(mine, Method.FSDP, 4), micro_batch=7)
    gap = explained(mine, row_of(other))
    assert (gap.method, gap.micro_batch, gap.settings) == (Method.FSDP, 7, ())


def test_a_config_with_more_in_it_is_the_same_model() -> None:
    mine = asked()
    step = step_of(mine)
    config = {**step.job.model.config, "torch_dtype": "float16", "use_cache": False}
    model = replace(step.job.model, name="opt", config=config)
    row = row_of(replace(step, job=replace(step.job, model=model)))
    assert explained(mine, row).settings == ()


def test_what_is_left_is_split_between_the_levels() -> None:
    request = asked()
    base = row_of(step_of(request))
    peak = base.peak_bytes
    more = {
        "allocated": peak["allocated"] + 1 * GIB,
        "reserved": peak["reserved"] + 3 * GIB,
        "device": peak["device"] + 7 * GIB,
    }
    numbers = {"context_bytes": GIB, "num_alloc_retries": 2, "num_other_processes": 3}
    row = replace(
        base,
        peak_bytes=more,
        numbers=numbers,
        ranks=tuple(
            Rank(rank=rank, outcome=Outcome.OK, peak_bytes={"device": rank * GIB})
            for rank in range(3)
        ),
        environment={"device_bytes_method": "nvml"},
    )
    gap = explained(request, row)
    causes = causes_of(gap)
    assert [causes[kind][0] for kind in ("tensors", "fragmentation", "outside")] == [
        GIB,
        2 * GIB,
        4 * GIB,
    ]
    assert sum(one for one, _ in causes.values() if one) == gap.levels[2].left_bytes
    assert "context 1.00 GiB" in causes["outside"][1]
    assert "3 other processes" in causes["foreign processes"][1]
    assert "2 times" in causes["alloc retries"][1]
    assert "2.00 GiB" in causes["ranks"][1]


@pytest.mark.parametrize(
    ("levels", "kinds"),
    [
        (["allocated"], ["tensors"]),
        (["reserved"], ["tensors, fragmentation"]),
        (["device"], ["tensors, fragmentation, outside"]),
        (["allocated", "device"], ["tensors", "fragmentation, outside"]),
        (["reserved", "device"], ["tensors, fragmentation", "outside"]),
        (["allocated", "reserved"], ["tensors", "fragmentation"]),
    ],
)
def test_what_is_left_lies_between_the_levels_that_were_seen(
    levels: list[str], kinds: list[str]
) -> None:
    request = asked()
    row = row_of(step_of(request))
    peaks = {level: row.peak_bytes[level] + (1 + at) * GIB for at, level in enumerate(levels)}
    gap = explained(request, replace(row, peak_bytes=peaks))
    causes = causes_of(gap)
    assert [kind for kind, (size, _) in causes.items() if size is not None] == kinds
    assert [causes[kind][0] for kind in kinds] == [GIB] * len(kinds)
    assert sum(causes[kind][0] or 0 for kind in kinds) == gap.level(levels[-1]).left_bytes


def test_a_measured_row_knows_what_was_kept() -> None:
    request = asked()
    step = step_of(request)
    column = estimate_step(step).ledger["loss_backward"]  # type: ignore[index]
    kept = sum(column[name] for name in ("weights", "optimizer_states", "workspaces"))  # type: ignore[index]
    gap = explained(request, row_of(step, numbers={"after_step_bytes": kept + GIB}))
    parts = {part.part: part for part in gap.parts}
    assert list(parts) == [KEPT, WITHIN]
    assert parts[KEPT].gap_bytes == GIB
    assert parts[WITHIN].gap_bytes == -GIB
    assert gap.unattributed_bytes == 0


def test_a_row_that_knows_owners_is_told_by_part() -> None:
    request = asked()
    ledger = {"loss_backward": {"weights": 5 * GIB, "logits": 2 * GIB, "unheard": GIB}}
    row = row_of(step_of(request), ledger=ledger, peak_bytes={"allocated": 8 * GIB})
    gap = explained(request, row)
    parts = {part.part: part for part in gap.parts}
    assert parts["weights"].measured_bytes == 5 * GIB
    assert parts["logits and loss"].measured_bytes == 2 * GIB
    assert parts["unheard"].terms == {}
    assert parts["optimizer states"].measured_bytes == 0
    assert gap.unattributed_bytes == 0
    assert gap.level("device").measured_bytes is None


def test_no_term_or_owner_belongs_to_two_parts() -> None:
    names = [name for part in PARTS.values() for name in dict.fromkeys(map(str, part))]
    assert len(names) == len(set(names))


def test_out_of_memory_is_told() -> None:
    request = asked()
    row = row_of(step_of(request), outcome=Outcome.OOM, oom_instant="forward_end")
    assert "at forward_end" in causes_of(explained(request, row))["out of memory"][1]
    nothing = replace(row, peak_bytes={})
    with pytest.raises(UserError, match=r"has no bytes \(outcome oom\)"):
        explained(request, nothing)


def test_the_row_of_the_asked_job_is_taken() -> None:
    mine = asked()
    rows = [row_of(step_of(asked(micro_batch=size))) for size in (1, 2, 4)]
    assert choose(rows, mine, FILE) == rows[2]
    assert choose(rows[:1], mine, FILE) == rows[0]
    with pytest.raises(UserError) as several:
        choose(rows, asked(micro_batch=None), FILE)
    assert all(row.row_id in several.value.allowed for row in rows)
    with pytest.raises(UserError, match=r"none of its 3 rows is of this job") as none:
        choose(rows, asked(micro_batch=3), FILE)
    assert "\n" not in str(none.value)
    many = [row_of(step_of(asked(micro_batch=size))) for size in range(5, 17)]
    with pytest.raises(UserError, match=r"and 4 more"):
        choose(many, mine, FILE)


def test_a_case_of_another_form_is_told() -> None:
    request = asked()
    row = row_of(step_of(request))
    wrong = [{"unheard": 1}, {"model": {}}, {"gpu": {"compute_capability": 8}}]
    for changes in wrong:
        other = replace(row, case={**row.case, **changes})
        with pytest.raises(UserError, match=r"measured=rows.jsonl: row .* not known here"):
            explained(request, other)


def test_what_the_estimator_has_no_answer_to_is_left_open() -> None:
    mine = asked()

    def without_accumulation(step: Step) -> Any:
        if step.job.grad_accum > 1:
            raise NotCoveredError(key="grad_accum", value=2, allowed="1")
        return estimate_step(step)

    row = row_of(step_of(asked(grad_accum=2)))
    gap = explain_row(compare(mine), without_accumulation, row, FILE)
    assert [setting.moved_bytes for setting in gap.settings] == [None]
    assert {level.settled_bytes for level in gap.levels} == {None}
    assert {level.left_bytes for level in gap.levels} == {None}
    assert "settings" in causes_of(gap)


def test_an_estimate_that_is_not_its_ledger_says_so() -> None:
    request = asked()

    def corrected(step: Step) -> Any:
        found = estimate_step(step)
        more = replace(found.peak_bytes, allocated=found.peak_bytes.allocated + GIB)
        return replace(found, peak_bytes=more)

    report: Report = compare(request)
    gap = explain_row(report, corrected, row_of(step_of(request)), FILE)
    assert "the terms told here" in causes_of(gap)["correction"][1]
    assert gap.level("allocated").gap_bytes == -GIB
