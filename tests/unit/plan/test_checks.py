"""What is said of a job that cannot run as asked, or may surprise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.errors import UserError
from src.plan.checks import check
from src.spec import Attention, Precision, Request
from tests.jobs import LORA
from tests.plan_requests import request_of


def warnings_of(request: Request) -> tuple[str, ...]:
    return check(request, describe(request.job.model))


def test_a_plain_job_has_no_warnings() -> None:
    assert warnings_of(request_of()) == ()


@pytest.mark.parametrize(("name", "limit"), [("opt-1.3b", 2048), ("gpt2", 1024)])
def test_a_learned_table_ends(name: str, limit: int) -> None:
    assert warnings_of(request_of(name, seq_len=limit)) == ()
    with pytest.raises(UserError) as caught:
        warnings_of(request_of(name, seq_len=limit + 1))
    assert (caught.value.key, caught.value.value) == ("seq_len", limit + 1)
    assert f"at most {limit}" in caught.value.allowed


@pytest.mark.parametrize(("name", "limit"), [("llama-2-7b", 4096), ("pythia-160m", 2048)])
def test_rotary_positions_go_on_with_a_warning(name: str, limit: int) -> None:
    assert warnings_of(request_of(name, seq_len=limit)) == ()
    (line,) = warnings_of(request_of(name, seq_len=limit + 1))
    assert f"seq_len={limit + 1} is beyond the {limit} positions" in line


def test_positions_by_bias_have_no_end() -> None:
    lines = warnings_of(request_of("bloom-560m", seq_len=100_000))
    assert not any("positions" in line for line in lines)


def test_attention_that_a_family_lacks_falls_back_with_a_warning() -> None:
    (line,) = warnings_of(request_of("bloom-560m"))
    assert "no sdpa attention for bloom" in line
    assert warnings_of(request_of("bloom-560m", attention=Attention.EAGER)) == ()


@pytest.mark.parametrize("precision", Precision)
def test_bf16_without_units_is_warned_about(precision: Precision) -> None:
    lines = warnings_of(request_of(sku="v100-16gb", precision=precision))
    assert bool(lines) == precision.value.startswith("bf16")
    assert all("precision=fp16-mixed" in line for line in lines)


def test_a_card_without_cuda_is_warned_about() -> None:
    (line,) = warnings_of(request_of(sku="mi300x"))
    assert "ROCm" in line


@pytest.mark.parametrize("targets", [(), ("all-linear",), ("q_proj",), ("fc1", "fc2")])
def test_targets_that_exist(targets: tuple[str, ...]) -> None:
    assert warnings_of(request_of(finetune=replace(LORA, targets=targets))) == ()


def test_a_target_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        warnings_of(request_of(finetune=replace(LORA, targets=("q_proj", "v_porj"))))
    assert (caught.value.key, caught.value.value) == ("finetune.targets", "v_porj")
    assert "v_proj" in caught.value.allowed


def test_a_router_is_no_target() -> None:
    with pytest.raises(UserError, match=r"finetune\.targets=gate"):
        warnings_of(request_of("mixtral-8x7b", finetune=replace(LORA, targets=("gate",))))
