"""What each kind of loss keeps, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture.losses import LIGER_FAMILIES, UPCASTS_4X, Upcast4x, check_loss
from src.errors import NotCoveredError
from src.memory import Instant, Term, ledger_of
from src.spec import Attention, Job, Loss, Optimizer, Precision
from tests.jobs import step_of, zoo_model

LLAMA = Job(model=zoo_model("llama-3.2-1b"), precision=Precision.BF16_TRUE)
OPT = replace(LLAMA, model=zoo_model("opt-1.3b"))
TOKENS = 4 * 512
V = {"llama": 128_256, "opt": 50_272}
D = 2048


def cells(job: Job, instant: Instant) -> dict[Term, int]:
    return ledger_of(step_of(job, micro_batch=4))[instant]


@pytest.mark.parametrize(
    ("job", "vocab", "standard", "last_generation"),
    [
        # bf16 logits, their fp32 copy, log-probabilities; 4.x: and a shifted copy
        (LLAMA, V["llama"], 2 + 4 + 4, 2 + 4 + 4 + 4),
        # 4.x leaves OPT's logits in bf16: a shifted copy and log-probabilities in bf16
        (OPT, V["opt"], 2 + 4 + 4, 2 + 2 + 2),
        (replace(OPT, precision=Precision.FP32), V["opt"], 4 + 4, 4 + 4 + 4),
        # under autocast `nll_loss` casts those log-probabilities to fp32 once more
        (replace(OPT, precision=Precision.BF16_MIXED), V["opt"], 2 + 4 + 4, 2 + 2 + 2 + 4),
    ],
)
def test_bytes_per_logit_inside_the_loss(
    job: Job, vocab: int, standard: int, last_generation: int
) -> None:
    for loss, bytes_ in ((Loss.STANDARD, standard), (Loss.STANDARD_4X, last_generation)):
        found = cells(replace(job, loss=loss), Instant.FORWARD_END)
        assert found[Term.LOGITS] + found[Term.LOSS_TEMPORARIES] == bytes_ * TOKENS * vocab


def test_the_last_generation_needs_what_a_published_run_took() -> None:
    # fms-acceleration, transformers 4.48.1, A100-80: Mistral-7B, r 16, micro batch 8, 4096 tokens;
    # the shifted copy is a thirteenth of it
    from tests.jobs import LORA

    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    job = Job(
        model=zoo_model("mistral-7b-v0.1"),
        finetune=replace(LORA, dropout=0.1, targets=targets),
        seq_len=4096,
        precision=Precision.BF16_TRUE,
        optimizer=Optimizer.ADAMW,
        attention=Attention.FLASH,
        loss=Loss.STANDARD_4X,
    )
    for micro_batch, published in ((4, 26_704_571_904), (8, 38_742_912_512)):
        ledger = ledger_of(step_of(job, micro_batch=micro_batch))
        peak = max(sum(column.values()) for column in ledger.values())
        assert peak == pytest.approx(published, rel=0.004)


def test_a_chunk_is_an_eighth_of_the_logits() -> None:
    found = cells(replace(LLAMA, loss=Loss.CHUNKED), Instant.FORWARD_END)
    chunk = TOKENS // 8 * V["llama"]
    assert found[Term.LOGITS] == found[Term.LOSS_TEMPORARIES] == 4 * chunk
    backward = cells(replace(LLAMA, loss=Loss.CHUNKED), Instant.LOSS_BACKWARD)
    # the weight's gradients of two chunks and their sum
    weight = 2 * V["llama"] * D
    assert 3 * weight <= backward[Term.ACTIVATION_GRADIENTS] < 3.2 * weight


def test_liger_keeps_both_gradients_and_the_logits_of_one_chunk() -> None:
    found = cells(replace(LLAMA, loss=Loss.LIGER), Instant.FORWARD_END)
    # cdiv(128256, 2048) = 63 chunks of cdiv(2048, 63) = 33 tokens, up to a power of two
    assert found[Term.LOGITS] == 2 * 64 * V["llama"]
    assert found[Term.GRADIENTS] == 2 * V["llama"] * D
    assert found[Term.ACTIVATION_GRADIENTS] == TOKENS * (2 * D + 4)
    assert Term.LOSS_TEMPORARIES not in found


def test_liger_under_autocast_casts_the_weight_twice() -> None:
    """Once through a view, which autocast does not cache, and once for good."""
    job = replace(LLAMA, loss=Loss.LIGER, precision=Precision.BF16_MIXED)
    plain = cells(replace(job, loss=Loss.STANDARD), Instant.FORWARD_END)
    found = cells(job, Instant.FORWARD_END)
    weight = 2 * V["llama"] * D
    assert found[Term.CAST_WEIGHTS] - plain[Term.CAST_WEIGHTS] == weight
    # the chunk's input in bf16
    assert found[Term.LOSS_TEMPORARIES] == 64 * D * 2


def test_before_compute_capability_8_liger_sums_a_product_of_the_weight_s_size() -> None:
    job = replace(LLAMA, loss=Loss.LIGER, precision=Precision.FP32)
    found = cells(job, Instant.FORWARD_END)
    assert found[Term.LOSS_TEMPORARIES] == 4 * V["llama"] * D
    half = replace(job, precision=Precision.BF16_TRUE)
    old = ledger_of(step_of(half, micro_batch=4, sku="v100-32gb"))[Instant.FORWARD_END]
    assert old[Term.LOSS_TEMPORARIES] == (2 + 4) * V["llama"] * D


@pytest.mark.parametrize(
    ("model_type", "loss"),
    [("qwen3", Loss.STANDARD_4X), ("gpt2", Loss.LIGER), ("granite", Loss.LIGER)],
)
def test_a_loss_that_a_family_lacks_is_refused_in_one_line(model_type: str, loss: Loss) -> None:
    with pytest.raises(NotCoveredError, match=f"loss={loss.value}: .*{model_type}.*standard"):
        check_loss(model_type, loss)


def test_every_family_is_known_to_the_tables() -> None:
    from src.architecture import supported_model_types

    supported = set(supported_model_types())
    assert set(UPCASTS_4X) < supported
    assert supported > LIGER_FAMILIES
    assert set(UPCASTS_4X.values()) == set(Upcast4x)
