"""DoRA's tensors on the query projection of a model 4,096 wide, by hand; runs of a forward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.errors import NotCoveredError, UserError
from src.memory import estimate_step
from src.memory.parts import parts_of
from src.memory.profile import Profile
from src.memory.size import Size, fixed, per_token
from src.memory.tape import Tape
from src.memory.terms import Term
from src.spec import (
    Checkpointing,
    Finetune,
    FinetuneKind,
    Job,
    Method,
    Precision,
    Quantization,
    refusal,
)
from tests.jobs import step_of, zoo_model

WIDTH, RANK = 4096, 16
SQUARE = WIDTH * WIDTH
DORA = Finetune(kind=FinetuneKind.LORA, dora=True, targets=("q_proj",), r=RANK)
JOB = Job(
    model=zoo_model("llama-2-7b"),
    finetune=DORA,
    precision=Precision.BF16_TRUE,
    checkpointing=Checkpointing.NONE,
)


def block(job: Job) -> Profile:
    """The second block: gradients flow into it, as the first one's adapters are trained."""
    step = step_of(job)
    return parts_of(step.job, step.method, step.layout, step.gpu).blocks[1]


def kept(profile: Profile, term: Term) -> Size:
    return profile.saved.get(term, Size())


def test_a_magnitude_keeps_two_products_and_three_rows() -> None:
    plain = block(replace(JOB, finetune=replace(DORA, dora=False)))
    more = kept(block(JOB), Term.SAVED_ACTIVATIONS)
    before = kept(plain, Term.SAVED_ACTIVATIONS)
    # Wx in bf16 and B(A(x)) in fp32; norm, magnitude over norm, and that minus one in fp32
    assert more.per_token - before.per_token == WIDTH * (2 + 4)
    assert more.fixed - before.fixed == 3 * WIDTH * 4


def test_dropout_keeps_the_weight_that_it_multiplies_again() -> None:
    dropped = block(replace(JOB, finetune=replace(DORA, dropout=0.1)))
    assert kept(block(JOB), Term.CAST_WEIGHTS) == Size()
    assert kept(dropped, Term.CAST_WEIGHTS) == fixed(4 * SQUARE)


@pytest.mark.parametrize(
    ("finetune", "precision", "num_bytes"),
    [
        # fp32: eye, W, BA, scaled BA, their sum
        (DORA, Precision.BF16_TRUE, 5 * 4 * SQUARE + RANK * WIDTH * 4),
        # the same without a copy of W
        (DORA, Precision.FP32, 4 * 4 * SQUARE + RANK * WIDTH * 4),
        # bf16 eye; fp32 BA, scaled BA, sum; W is stored in fp32
        (DORA, Precision.BF16_MIXED, (2 + 3 * 4) * SQUARE + RANK * WIDTH * 2),
        # bf16 eye; W, dequantised, is turned to the fp32 of the residual stream
        (
            replace(DORA, kind=FinetuneKind.QLORA, quantization=Quantization.NF4),
            Precision.BF16_MIXED,
            (2 + 4 * 4) * SQUARE + RANK * WIDTH * 2,
        ),
    ],
)
def test_the_norm_of_a_weight_needs_weights_beside_it(
    finetune: Finetune, precision: Precision, num_bytes: int
) -> None:
    profile = block(replace(JOB, finetune=finetune, precision=precision))
    most = max(moment.terms[Term.ACTIVATION_GRADIENTS].fixed for moment in profile.crowded)
    assert most == num_bytes + 4 * WIDTH


def test_a_recomputation_ends_before_the_output_of_what_saves_last() -> None:
    tape = Tape(runs_again=True)
    source, first, second, out = (tape.tensor(width, 1) for width in (1, 10, 100, 1000))
    with tape.beside(per_token(5)):
        tape.record(first, [source], saved=[source])
    tape.record(second, [first], saved=[first])
    tape.record(out, [second])
    moments, _ = tape.walk(out)
    sizes = {moment.size.per_token for moment in moments}
    # out's gradient and second's; then with first saved: second's gradient and first's
    assert max(sizes) == 1000 + 100
    assert tape.crowded(out) == []


def test_tensors_beside_an_operation_are_alive_while_it_runs() -> None:
    tape = Tape()
    source, first, out = (tape.tensor(width, 1) for width in (1, 10, 100))
    with tape.beside(per_token(5000)):
        tape.record(first, [source], saved=[source])
    tape.record(out, [first])
    (moment,) = tape.crowded(out)
    assert moment.size == per_token(1 + 10 + 5000)
    # Run again for the gradient of `first`, which waits.
    again = Tape(runs_again=True)
    source, first, out = (again.tensor(width, 1) for width in (1, 10, 100))
    with again.beside(per_token(5000)):
        again.record(first, [source], saved=[first])
    again.record(out, [first])
    assert max(moment.size.per_token for moment in again.walk(out)[0]) == 1 + 10 + 10 + 5000


def test_whole_weights_are_needed() -> None:
    broken = refusal(JOB, Method.TP)
    assert isinstance(broken, UserError)
    assert broken.key == "method"
    sharded = replace(JOB, precision=Precision.BF16_MIXED)
    with pytest.raises(NotCoveredError):
        estimate_step(step_of(sharded, Method.ZERO3, gpus=4))
