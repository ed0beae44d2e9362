"""What sequence parallelism splits, gathers and adds, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from src.architecture import describe
from src.errors import UserError
from src.memory import Instant, Term, estimate_step, ledger_of
from src.memory.counts import count_model, trained_tensors
from src.memory.tape import Tape
from src.spec import Checkpointing, Finetune, Job, Layout, Method, Precision, Step
from tests.jobs import LORA, gpu, zoo_model

BLOCKS, BATCH, SEQUENCE, HIDDEN = 24, 4, 512, 2048
JOB = Job(
    model=zoo_model("opt-1.3b"),
    precision=Precision.BF16_TRUE,
    checkpointing=Checkpointing.FULL,
    seq_len=SEQUENCE,
)


def step(job: Job, *, tp: int) -> Step:
    layout = Layout(tp=tp)
    return Step(job=job, method=Method.TP, layout=layout, gpu=gpu(), micro_batch=BATCH)


def split(job: Job) -> Job:
    return replace(job, sequence_parallel=True)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_checkpoints_are_parts_of_the_sequence(tp: int) -> None:
    whole = ledger_of(step(JOB, tp=tp))[Instant.FORWARD_END][Term.CHECKPOINTS]
    parts = ledger_of(step(split(JOB), tp=tp))[Instant.FORWARD_END][Term.CHECKPOINTS]
    assert whole == BLOCKS * BATCH * SEQUENCE * HIDDEN * 2
    assert parts == whole // tp


def test_what_the_linears_take_is_kept_whole() -> None:
    """Per block: two norms' inputs and two dropouts' masks are halved, nothing else.

    OPT's dropout keeps a byte per element; its norms keep their input (2 bytes) and two fp32
    statistics a token; the Linears keep what they are given, gathered.
    """
    job = replace(JOB, checkpointing=Checkpointing.NONE)
    whole = ledger_of(step(job, tp=2))[Instant.FORWARD_END]
    parts = ledger_of(step(split(job), tp=2))[Instant.FORWARD_END]
    tokens = BATCH * SEQUENCE
    masks = whole[Term.DROPOUT_MASKS] - parts[Term.DROPOUT_MASKS]
    # The stem's dropout, where there is one, runs on the whole sequence.
    assert masks == BLOCKS * 2 * tokens * HIDDEN // 2
    norms = (2 * BLOCKS + 1) * tokens * (2 * HIDDEN + 2 * 4) // 2
    assert whole[Term.SAVED_ACTIVATIONS] - parts[Term.SAVED_ACTIVATIONS] == norms


def test_weights_are_those_of_tensor_parallelism() -> None:
    whole, parts = ledger_of(step(JOB, tp=4)), ledger_of(step(split(JOB), tp=4))
    assert whole[Instant.OPTIMIZER_STEP] == parts[Instant.OPTIMIZER_STEP]


def test_without_tensor_parallelism_it_changes_nothing() -> None:
    alone = Step(job=JOB, method=Method.SINGLE, layout=Layout(), gpu=gpu(), micro_batch=BATCH)
    assert ledger_of(alone) == ledger_of(replace(alone, job=split(JOB)))


def test_gradients_of_distributed_tensors_are_added_into_a_third_one() -> None:
    """Two readers of a gathered tensor of 10 elements: both gradients and their sum are alive."""
    tape = Tape()
    gathered = tape.tensor(10, 2)
    outs = [tape.tensor(1, 2) for _ in range(2)]
    for out in outs:
        tape.record(out, [gathered])
    joined = tape.tensor(1, 2)
    tape.record(joined, outs)

    def most() -> float:
        return max(moment.size.per_token for moment in tape.walk(joined)[0])

    assert most() == 2 * 20 + 2
    tape.add_apart(gathered)
    assert most() == 3 * 20


def test_a_weight_gradient_counts_once_while_the_sum_is_formed() -> None:
    """Two products of a gathered tensor of 10 elements: a weight of 100 bytes each."""
    tape = Tape()
    gathered = tape.tensor(10, 2)
    tape.add_apart(gathered)
    outs = [tape.tensor(1, 2) for _ in range(2)]
    for out in outs:
        tape.record(out, [gathered, tape.parameter(50, 2, requires_grad=True)])
    joined = tape.tensor(1, 2)
    tape.record(joined, outs)
    moments, gradients = tape.walk(joined)
    assert gradients.fixed == 200
    assert max(moment.size.fixed for moment in moments) == 200


def test_a_sequence_that_the_group_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"seq_len=510: a multiple of the .* degree 4 "):
        estimate_step(step(replace(split(JOB), seq_len=510), tp=4))


@pytest.mark.parametrize(
    ("name", "first", "second"), [("llama-3.2-1b", 32768, 16384), ("olmo-2-1b", 32768, 32768)]
)
def test_adapters_follow_what_is_split_outside_their_linear(
    name: str, first: int, second: int
) -> None:
    """LoRA's A and B of q (2048 x 2048, rank 16) over two GPUs; OLMo 2 gathers its outputs."""
    decoder = describe(zoo_model(name))
    tensors = trained_tensors(decoder, finetune=replace(LORA, targets=("q_proj",)), tp=2)
    assert [tensor.numel for tensor in tensors[:2]] == [first, second]


def test_every_expert_is_split_over_the_group() -> None:
    """Mixtral's block: 8 experts of 3 x 4096 x 14336, an attention of 2 x 4096 x (4096 + 1024)."""
    decoder = describe(zoo_model("mixtral-8x7b"))
    whole, halves = (count_model(decoder, finetune=Finetune(), tp=tp).blocks[0] for tp in (1, 2))
    split = 8 * 3 * 4096 * 14336 + 2 * 4096 * (4096 + 1024)
    assert whole.base - halves.base == split / 2


@pytest.mark.parametrize(("tp", "part"), [(2, 1 / 2), (4, 1 / 4)])
def test_what_a_whole_input_is_cut_to_is_what_a_linear_keeps(tp: int, part: float) -> None:
    """OLMo 2: o keeps its part of a copy of what the attention gives, 2048 wide."""
    job = Job(
        model=zoo_model("olmo-2-1b", num_hidden_layers=1),
        precision=Precision.BF16_TRUE,
        checkpointing=Checkpointing.NONE,
        seq_len=SEQUENCE,
    )
    whole, split = (
        ledger_of(Step(job=job, method=method, layout=layout, gpu=gpu(), micro_batch=BATCH))[
            Instant.FORWARD_END
        ][Term.SAVED_ACTIVATIONS]
        for method, layout in ((Method.SINGLE, Layout()), (Method.TP, Layout(tp=tp)))
    )
    tokens, hidden, inner = BATCH * SEQUENCE, 2048, 8192
    # The MLP keeps gate, its activation, up and their product: of each this GPU's part.
    assert whole - split == tokens * 2 * (4 * inner + hidden) * (1 - part)
