"""What a forward pass has on the GPU besides what it keeps."""

from __future__ import annotations

from dataclasses import replace

from src.memory.parts import parts_of
from src.memory.size import per_token
from src.memory.tape import Tape
from src.spec import Checkpointing, Job, Method
from tests.jobs import step_of, zoo_model

JOB = Job(model=zoo_model("opt-1.3b"))


def test_a_tensor_lives_until_it_is_read_for_the_last_time() -> None:
    tape = Tape()
    source, first, second, third = (tape.tensor(width, 1) for width in (1, 10, 100, 1000))
    tape.record(first, [source])
    tape.record(second, [first])
    tape.record(third, [second])
    (found,) = tape.working(source, third)
    assert found.size == per_token(1100)
    assert set(found.blocks) >= {per_token(100), per_token(1000)}


def test_what_is_kept_is_counted_elsewhere_unless_it_is_recomputed() -> None:
    for runs_again, expected in ((False, 1000), (True, 1100)):
        tape = Tape(runs_again=runs_again)
        source, kept, out = (tape.tensor(width, 1) for width in (1, 100, 1000))
        tape.record(kept, [source], saved=[kept])
        tape.record(out, [kept])
        (found,) = tape.working(source, out)
        assert found.size == per_token(expected)


def test_a_block_that_keeps_its_tensors_needs_little_besides() -> None:
    kept, again = (
        parts_of(step.job, step.method, step.layout, step.gpu).blocks[0].working
        for step in (
            step_of(replace(JOB, checkpointing=checkpointing), Method.SINGLE)
            for checkpointing in (Checkpointing.NONE, Checkpointing.FULL)
        )
    )
    assert max(one.size.per_token for one in kept) < max(one.size.per_token for one in again)
