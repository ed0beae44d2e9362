"""The symbolic autograd tape on graphs small enough to work out by hand."""

from __future__ import annotations

from src.memory.size import ZERO, Size, per_token
from src.memory.tape import Tape
from src.memory.terms import Term
from src.memory.values import Value


def linear(tape: Tape, source: Value, width: int) -> Value:
    weight = tape.parameter(source.width * width, 2, requires_grad=True)
    out = tape.tensor(width, 2)
    tape.record(out, [source, weight], saved=[source, weight])
    return out


def test_a_chain_keeps_each_input_once() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    middle = linear(tape, source, 20)
    out = linear(tape, middle, 5)
    # inputs of both Linears, 2 bytes an element: 10 and 20 wide
    assert tape.saved(without=out) == {Term.SAVED_ACTIVATIONS: per_token(60)}
    assert tape.saves(source)
    assert not tape.saves(out)


def test_a_tensor_saved_twice_counts_once_and_lives_until_its_first_user_has_run() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    left, right = linear(tape, source, 10), linear(tape, source, 10)
    out = tape.tensor(10, 2)
    tape.record(out, [left, right], passed=[left, right])
    assert tape.saved(without=out) == {Term.SAVED_ACTIVATIONS: per_token(20)}
    moments, gradients = tape.walk(out)
    # both weights' gradients, 100 elements of 2 bytes each, stay
    assert gradients == Size(fixed=400)
    # largest: source saved (20), gradients of out (20, shared) and of source twice (20 + 20),
    # one weight's gradient settled and one fresh
    largest = max(moment.size.fixed + 1000 * moment.size.per_token for moment in moments)
    assert largest == 400 + 1000 * 80


def test_what_comes_from_constants_needs_no_gradient_and_keeps_nothing() -> None:
    tape = Tape()
    source = tape.tensor(10, 2, requires_grad=False)
    frozen = tape.parameter(100, 2, requires_grad=False)
    out = tape.tensor(10, 2)
    tape.record(out, [source, frozen], saved=[source, frozen])
    assert tape.saved(without=out) == {}
    assert not tape.needs_gradient(out)
    moments, gradients = tape.walk(out)
    assert (moments, gradients) == ([], ZERO)


def test_parts_of_a_split_are_joined_when_the_last_gradient_is_there() -> None:
    tape = Tape()
    source = tape.tensor(1, 2)
    joint = linear(tape, source, 30)
    parts = [tape.view(joint, 10) for _ in range(3)]
    out = tape.tensor(10, 2)
    tape.record(out, parts, saved=parts)
    # the parts share the storage of the whole: 60 bytes, once
    assert tape.saved(without=out)[Term.SAVED_ACTIVATIONS] == per_token(62)
    moments, _ = tape.walk(out)
    joined = max(moment.size.per_token for moment in moments)
    # whole saved (2 + 60), gradient of out 20, then three of parts 60
    assert joined == 62 + 20 + 60


def test_a_gradient_that_exists_is_added_to_and_not_counted_again() -> None:
    tape = Tape()
    table = tape.parameter(100, 4, requires_grad=True, accumulates=True)
    out = tape.tensor(10, 4)
    tape.record(out, [table])
    moments, gradients = tape.walk(out)
    assert gradients == ZERO
    assert max(moment.size.fixed for moment in moments) == 400


def test_a_checkpointed_function_keeps_its_input_until_its_last_saver_runs_again() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    outer = linear(tape, source, 10)
    with tape.checkpointed([outer]):
        middle = linear(tape, outer, 40)
        inner = linear(tape, middle, 10)
    out = linear(tape, inner, 5)
    # source, the function's input, and the last Linear's input: 10 wide each; the 40 are not kept
    assert tape.saved(without=out) == {Term.SAVED_ACTIVATIONS: per_token(60)}
    assert tape.recomputed() == {Term.SAVED_ACTIVATIONS: per_token(80)}
    moments, _ = tape.walk(out)
    kept = [moment.terms[Term.SAVED_ACTIVATIONS].per_token for moment in moments]
    # while the function's last node runs: source, input and, again, what is 40 wide
    assert max(kept) == 20 + 20 + 80


def test_pieces_along_the_tokens_are_joined_into_one_gradient() -> None:
    tape = Tape()
    source = linear(tape, tape.tensor(1, 2), 12)
    halves = tape.pieces(source, 2)
    assert [half.size for half in halves] == [per_token(12), per_token(12)]
    tape.token_share = 0.5
    ends = [tape.tensor(6, 2), tape.tensor(6, 2)]
    assert [end.size for end in ends] == [per_token(6), per_token(6)]
    for half, end in zip(halves, ends, strict=True):
        tape.record(end, [half])
    out = tape.tensor(0, 2)
    tape.record(out, ends)
    moments, _ = tape.walk(out)
    # both halves' gradients and the whole of them
    flowing = [moment.terms[Term.ACTIVATION_GRADIENTS].per_token for moment in moments]
    assert max(flowing) == 24 + 24
