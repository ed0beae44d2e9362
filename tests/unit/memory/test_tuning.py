"""What a kind of fine-tuning does to single Linears, by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.architecture.ops import Linear, Parallel
from src.memory import Instant, Term, count_model, estimate_step, ledger_of
from src.memory.tuning import is_quantised, is_target, storage_of, trains_block
from src.spec import (
    Checkpointing,
    Finetune,
    FinetuneKind,
    Job,
    Method,
    Precision,
    Quantization,
    Upcast,
)
from tests.jobs import LORA, small_model, step_of, zoo_model

QLORA = Finetune(kind=FinetuneKind.QLORA)
PLAIN = replace(QLORA, upcast=Upcast.NONE)
INT8 = replace(QLORA, quantization=Quantization.INT8)
LLAMA = Job(model=zoo_model("llama-3-8b"), precision=Precision.BF16_TRUE)
QUANTISED = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
REST = 8_030_261_248 - QUANTISED


def linear(name: str, *, is_module: bool = True) -> Linear:
    return Linear(
        source="x",
        out="y",
        width=8,
        name=name,
        in_features=8,
        bias=False,
        parallel=Parallel.REPLICATED,
        is_module=is_module,
    )


@pytest.mark.parametrize(
    ("target", "name", "taken"),
    [
        ("c_proj", "attn.c_proj", True),
        ("attn.c_proj", "attn.c_proj", True),
        ("attn.c_proj", "mlp.c_proj", False),
        ("proj", "attn.c_proj", False),
        ("attn", "attn.c_proj", False),
        ("self_attn.q_proj", "self_attn.q_proj", True),
    ],
)
def test_a_target_is_a_name_or_its_end_at_a_dot(target: str, name: str, taken: bool) -> None:
    finetune = Finetune(kind=FinetuneKind.LORA, targets=(target,))
    assert is_target(linear(name), finetune, "lm_head") is taken


@pytest.mark.parametrize("finetune", [replace(LORA, targets=("all-linear",)), QLORA])
def test_the_head_and_what_is_no_module_are_left_alone(finetune: Finetune) -> None:
    rule = is_quantised if finetune is QLORA else is_target
    assert rule(linear("mlp.fc1"), finetune, "lm_head")
    assert not rule(linear("lm_head"), finetune, "lm_head")
    assert not rule(linear("mlp.gate", is_module=False), finetune, "lm_head")


def test_four_bits_with_quantised_scales_are_0_5159_bytes_a_weight() -> None:
    numel = 4096 * 4096
    found = storage_of(QLORA, outputs=4096, numel=numel)
    assert found.weight_bytes == numel // 2
    assert found.statistics_bytes == numel // 64 + 4 * numel // 64 // 256 + 4 * (256 + 16 + 1)
    total = found.weight_bytes + found.statistics_bytes
    assert total / numel == pytest.approx(0.5159, abs=1e-4)


def test_plain_scales_are_fp32_and_int8_has_one_for_each_output() -> None:
    numel = 4096 * 1000
    plain = storage_of(replace(QLORA, double_quant=False), outputs=1000, numel=numel)
    assert plain.statistics_bytes == 4 * (numel // 64 + 16)
    int8 = storage_of(INT8, outputs=1000, numel=numel)
    assert (int8.weight_bytes, int8.rows, int8.statistics_bytes) == (numel, 1000, 4000)


@pytest.mark.parametrize(("upcast", "rest"), [(Upcast.ALL, 4), (Upcast.NONE, 2)])
def test_what_is_not_quantised_is_half_precision_or_fp32(upcast: Upcast, rest: int) -> None:
    job = replace(LLAMA, finetune=replace(QLORA, upcast=upcast))
    weights = ledger_of(step_of(job))[Instant.OPTIMIZER_STEP][Term.WEIGHTS]
    statistics = QUANTISED * (1 / 64 + 4 / 64 / 256) + 7 * 32 * 4 * (256 + 16 + 1)
    adapters = 4 * 13_631_488
    assert weights == pytest.approx(QUANTISED / 2 + statistics + REST * rest + adapters, abs=2)


def test_norms_alone_are_fp32() -> None:
    job = replace(LLAMA, precision=Precision.BF16_MIXED)
    none, norms = (
        ledger_of(step_of(replace(job, finetune=replace(QLORA, upcast=upcast))))[Instant.LOAD][
            Term.WEIGHTS
        ]
        for upcast in (Upcast.NONE, Upcast.NORMS)
    )
    assert norms - none == 2 * (32 * 2 + 1) * 4096


@pytest.mark.parametrize("finetune", [QLORA, PLAIN, INT8])
def test_quantisation_changes_no_count(finetune: Finetune) -> None:
    decoder = describe(LLAMA.model)
    found = count_model(decoder, finetune=finetune).all
    assert found.base == decoder.num_parameters
    assert found.packed == QUANTISED
    assert found.trained == 13_631_488


@pytest.mark.parametrize("gpus", [2, 8])
def test_ddp_of_a_quantised_model_is_a_replica_on_every_gpu(gpus: int) -> None:
    """Two GPUs did not fit what one did not: DDP adds buckets and takes nothing away."""
    job = replace(LLAMA, finetune=QLORA)
    single, ddp = (
        estimate_step(step_of(job, method, gpus=gpus if method is Method.DDP else 1))
        for method in (Method.SINGLE, Method.DDP)
    )
    buckets = 4 * 13_631_488
    assert ddp.peak_bytes.allocated - single.peak_bytes.allocated == buckets
    fsdp = ledger_of(step_of(job, Method.FSDP, gpus=gpus))[Instant.LOAD][Term.WEIGHTS]
    assert fsdp < 0.7 * single.ledger[Instant.LOAD][Term.WEIGHTS]


@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.NONE])
@pytest.mark.parametrize("kind", [FinetuneKind.LORA, FinetuneKind.QLORA])
def test_adapters_shrink_states_and_no_activation(
    checkpointing: Checkpointing, kind: FinetuneKind
) -> None:
    """16 GB were 90 % full at batch 3 whatever the rank: activations are those of the whole."""
    finetune = Finetune(kind=kind, upcast=Upcast.NONE)
    full, adapted = (
        ledger_of(step_of(replace(LLAMA, finetune=chosen, checkpointing=checkpointing)))[
            Instant.FORWARD_END
        ]
        for chosen in (Finetune(), finetune)
    )
    for term in (Term.LOGITS, Term.LOSS_TEMPORARIES):
        assert adapted[term] == full[term]
    kept = (Term.CHECKPOINTS, Term.SAVED_ACTIVATIONS)
    before, after = (sum(cells.get(term, 0) for term in kept) for cells in (full, adapted))
    assert after > 0.7 * before
    assert adapted[Term.OPTIMIZER_STATES] < 0.03 * full[Term.OPTIMIZER_STATES]


def test_int8_inputs_outlive_checkpointing() -> None:
    """Each int8 Linear's node has its input as an attribute, which no hook takes away."""
    nf4, int8 = (
        ledger_of(step_of(replace(LLAMA, finetune=finetune)))[Instant.LOSS_BACKWARD]
        for finetune in (PLAIN, replace(INT8, upcast=Upcast.NONE))
    )
    inputs = 32 * 512 * (4096 + 4096 + 4096 + 14336) * 2
    assert int8[Term.SAVED_ACTIVATIONS] - nf4[Term.SAVED_ACTIVATIONS] == inputs


def test_only_the_last_blocks_are_trained() -> None:
    finetune = Finetune(kind=FinetuneKind.FREEZE, trained_blocks=3)
    assert [trains_block(finetune, index, 5) for index in range(5)] == [False] * 2 + [True] * 3


def test_all_linear_reaches_linears_outside_the_blocks() -> None:
    finetune = replace(LORA, targets=("all-linear",), r=4)
    decoder = describe(small_model("bert"))
    hidden = decoder.hidden_size
    edges = count_model(decoder, finetune=finetune).edges
    assert edges.adapters == 4 * 2 * hidden
