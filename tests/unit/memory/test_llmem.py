"""LLMem's formulas, by hand for opt-1.3b on V100s; what they refuse; laws they obey."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.errors import NotCoveredError, UserError
from src.memory.llmem import (
    FAMILIAR,
    LlmemInstant,
    LlmemTerm,
    base_bytes,
    chunked_model,
    llmem_step,
    up,
)
from src.plan import compare
from src.spec import (
    Checkpointing,
    EstimatorKind,
    Job,
    Layout,
    Loss,
    Method,
    Offload,
    Optimizer,
    Precision,
    Request,
    Step,
    Verdict,
)
from src.units import MIB
from tests.jobs import LORA, small_model, step_of, zoo_model
from tests.plan_requests import request_of
from tests.small_configs import SMALL_CONFIGS

UNIT = 2 * MIB
OPT = Job(model=zoo_model("opt-1.3b"), precision=Precision.FP16_MIXED)

# opt-1.3b: V 50272, D 2048, L 24, 2050 positions, 1,315,758,080 parameters; B 1, S 512
M_P = 3765 * UNIT  # 107,155,456 embedded and 36 chunks of 33,574,912, 6 bytes each
M_P16, M_P32 = 1255 * UNIT, 2510 * UNIT
M_OS = (393 + 17 + 24 * (4 * (16 + 1) + 2 * (64 + 1))) * UNIT
M_OUT = 26 * UNIT  # 24 blocks and two embeddings, 1 MiB of tokens x D at 2 bytes each
M_LM = (25 + 2 * 25 + 99) * UNIT
M_BACK = {2: 12 * UNIT, 4: 18 * UNIT}


def step(method: Method, layout: Layout | None = None, **keys: Any) -> Step:
    found = step_of(OPT, method, gpus=1 if method is Method.SINGLE else 4, sku="v100-16gb")
    return replace(found, layout=layout or found.layout, **keys)


def terms_of(asked: Step) -> dict[LlmemTerm, int]:
    return dict(llmem_step(asked).ledger[LlmemInstant.SUM_OF_TERMS])


@pytest.mark.parametrize(
    ("method", "terms"),
    [
        (
            method,
            {
                LlmemTerm.M_P: M_P,
                LlmemTerm.M_OS: M_OS,
                LlmemTerm.M_OUT: M_OUT,
                LlmemTerm.M_LM: M_LM,
            },
        )
        for method in (Method.SINGLE, Method.DDP)
    ]
    + [
        (
            Method.FSDP,
            {
                LlmemTerm.M_P16: M_P16,
                LlmemTerm.M_P32: M_P32 // 4,
                LlmemTerm.M_OS: M_OS // 4,
                LlmemTerm.M_OUT: M_OUT,
                LlmemTerm.M_LM: M_LM,
            },
        ),
        (
            Method.TP,
            {
                LlmemTerm.M_P: M_P // 4,
                LlmemTerm.M_OS: M_OS // 4,
                LlmemTerm.M_OUT: M_OUT,
                LlmemTerm.M_LM: M_LM,
                LlmemTerm.M_BACK: M_BACK[4],
            },
        ),
        (
            Method.FSDP_TP,
            {
                LlmemTerm.M_P16: M_P16 // 2,
                LlmemTerm.M_P32: M_P32 // 4,
                LlmemTerm.M_OS: M_OS // 4,
                LlmemTerm.M_OUT: M_OUT,
                LlmemTerm.M_LM: M_LM,
                LlmemTerm.M_BACK: M_BACK[2],
            },
        ),
    ],
)
def test_every_term_by_hand(method: Method, terms: dict[LlmemTerm, int]) -> None:
    assert terms_of(step(method)) == terms


@pytest.mark.parametrize(
    ("method", "nccl"),
    [
        (Method.SINGLE, 0),
        (Method.DDP, 1485),
        (Method.FSDP, 1485),
        (Method.TP, 1485),
        (Method.FSDP_TP, 1485 + 544),
    ],
)
def test_the_device_adds_context_and_nccl(method: Method, nccl: int) -> None:
    # 80 SMs of 4.5 MiB each, and NCCL's first and further communicators
    found = llmem_step(step(method))
    base = (360 + nccl) * MIB
    assert base_bytes(step(method)) == base
    assert found.peak_bytes.device == sum(terms_of(step(method)).values()) + base
    assert found.peak_bytes.reserved == found.peak_bytes.device - base
    assert found.upper_bytes == found.peak_bytes


def test_three_replicas_round_their_share_up() -> None:
    # 3 does not divide 1255 units, and chunks of 33,574,912 grow to a multiple of 3
    found = terms_of(step(Method.FSDP, Layout(dp=3, shard=3)))
    assert chunked_model(OPT.model, 3).chunk == 33_574_914
    assert found[LlmemTerm.M_P32] == -(-M_P32 // 3)


def test_dp_and_tp_is_adp_less_a_share_of_the_parameters_and_with_gathers() -> None:
    for dp, tp in ((2, 2), (4, 2), (2, 4)):
        gpus = dp * tp
        both = llmem_step(step(Method.FSDP_TP, Layout(dp=dp, tp=tp, shard=dp))).peak_bytes
        adp = llmem_step(step(Method.FSDP, Layout(dp=gpus, shard=gpus))).peak_bytes
        whole = terms_of(step(Method.FSDP, Layout(dp=gpus, shard=gpus)))[LlmemTerm.M_P16]
        assert both.reserved == adp.reserved - whole * tp // gpus + M_BACK[tp]


@pytest.mark.parametrize(
    ("name", "logit_bytes"),
    [("codegen-350m", 4), ("gpt-neo-125m", 4), ("gpt-neox-20b", 2), ("gpt-j-6b", 2), ("gpt2", 2)],
)
def test_codegen_and_gpt_neo_have_fp32_logits(name: str, logit_bytes: int) -> None:
    model = chunked_model(zoo_model(name), 1)
    assert model.logit_bytes == logit_bytes
    found = terms_of(replace(step(Method.SINGLE), job=replace(OPT, model=zoo_model(name))))
    assert found[LlmemTerm.M_LM] == model.head + sum(
        up(length * model.vocab * logit_bytes) for length in (512, 511, 511)
    )


def test_a_small_model_is_counted_once_and_not_beside_its_embeddings() -> None:
    model = zoo_model("pythia-70m", hidden_size=128, intermediate_size=512)
    found = chunked_model(model, 1)
    assert found.elements == found.chunk < 32 * MIB
    assert found.num_outputs == 1 + found.num_blocks


def test_an_untied_head_has_states_and_a_tied_one_has_none_of_its_own() -> None:
    tied, untied = (
        chunked_model(zoo_model("gpt-neox-20b", tie_word_embeddings=flag), 1)
        for flag in (True, False)
    )
    assert untied.states - tied.states == up(50432 * 6144 * 8)
    assert untied.head == tied.head == up(50432 * 6144 * 2)


@given(
    name=st.sampled_from(sorted(SMALL_CONFIGS)),
    method=st.sampled_from(FAMILIAR),
    batch=st.integers(1, 64),
    seq_len=st.integers(1, 2000),
    more=st.integers(0, 50),
)
def test_more_tokens_never_take_less(
    name: str, method: Method, batch: int, seq_len: int, more: int
) -> None:
    job = Job(model=small_model(name), seq_len=seq_len)
    one = step_of(job, method, gpus=1 if method is Method.SINGLE else 4, micro_batch=batch)
    peak = llmem_step(one).peak_bytes.device
    longer = replace(one, job=replace(job, seq_len=seq_len + more))
    assert llmem_step(longer).peak_bytes.device >= peak
    assert llmem_step(replace(one, micro_batch=batch + more)).peak_bytes.device >= peak


@given(name=st.sampled_from(sorted(SMALL_CONFIGS)), dp=st.integers(1, 16))
def test_more_replicas_shard_the_states_further(name: str, dp: int) -> None:
    def states(count: int) -> int:
        layout = Layout(dp=count, shard=count)
        job = replace(OPT, model=small_model(name))
        return terms_of(replace(step(Method.FSDP, layout), job=job))[LlmemTerm.M_OS]

    assert states(dp + 1) <= states(dp)
    assert states(dp) * dp >= states(1)


@pytest.mark.parametrize("method", [method for method in Method if method not in FAMILIAR])
def test_a_method_without_a_formula_is_not_covered(method: Method) -> None:
    with pytest.raises(NotCoveredError, match=r"^method=.*: LLMem") as caught:
        llmem_step(step_of(OPT, method, gpus=4))
    assert ("method=fsdp+tp" in caught.value.allowed) is (method is Method.DDP_TP)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("finetune", {"finetune": LORA}),
        ("precision", {"precision": Precision.BF16_TRUE}),
        ("precision", {"precision": Precision.FP32}),
        ("optimizer", {"optimizer": Optimizer.SGD_MOMENTUM}),
        ("checkpointing", {"checkpointing": Checkpointing.NONE}),
        ("checkpoint_every", {"checkpoint_every": 2}),
        ("loss", {"loss": Loss.LIGER}),
        ("offload", {"offload": Offload.ALL}),
        ("activation_offload", {"activation_offload": True}),
        ("sequence_parallel", {"sequence_parallel": True}),
        ("vocab_parallel", {"vocab_parallel": True}),
        ("grad_accum", {"grad_accum": 2}),
    ],
)
def test_a_job_that_llmem_does_not_speak_of_is_refused(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{key}=.*: estimator=llmem knows .* only$") as caught:
        llmem_step(replace(step(Method.SINGLE), job=replace(OPT, **changes)))
    assert not isinstance(caught.value, NotCoveredError)


def test_bf16_is_the_same_and_says_so() -> None:
    fp16 = llmem_step(step(Method.FSDP))
    job = replace(OPT, precision=Precision.BF16_MIXED)
    bf16 = llmem_step(replace(step(Method.FSDP), job=job))
    assert bf16.peak_bytes == fp16.peak_bytes
    assert not fp16.notes
    assert bf16.notes == ("LLMem speaks of fp16: bf16 takes the same bytes",)


def compared(name: str, **keys: Any) -> Any:
    job = {"precision": Precision.FP16_MIXED} | {
        key: keys.pop(key) for key in ("precision", "seq_len") if key in keys
    }
    request: Request = request_of(
        name, sku="v100-16gb", estimator=EstimatorKind.LLMEM, **keys, **job
    )
    return compare(request, llmem_step, kind=EstimatorKind.LLMEM)


def test_methods_without_a_formula_are_left_out_of_a_comparison() -> None:
    report = compared("opt-1.3b")
    assert {row.method for row in report.methods} == {
        Method.DDP,
        Method.FSDP,
        Method.TP,
        Method.FSDP_TP,
    }
    assert any(
        line.startswith("zero1, zero2, zero3, fsdp-grad, hsdp left out") for line in report.warnings
    )
    assert any(line.startswith("ddp+tp left out") for line in report.warnings)
    assert report.warnings[-1].startswith("LLMem's figure is the device level")


def test_where_nothing_fits_what_is_lacking_is_told() -> None:
    report = compared("opt-2.7b", gpus=1)
    assert report.recommended is None
    (lack,) = [line for line in report.warnings if line.startswith("nothing fits")]
    assert "20.00 GiB more than v100-16gb has" in lack
    enough = compared("opt-2.7b", gpus=4)
    assert any(row.verdict is Verdict.FITS for row in enough.methods)
