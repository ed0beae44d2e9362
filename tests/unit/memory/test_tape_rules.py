"""What the tape holds by term, keeps by order, and releases when."""

from __future__ import annotations

from src.memory.size import ZERO, fixed, per_score, per_token
from src.memory.tape import Tape
from src.memory.terms import Term
from src.memory.values import Moment, Value, merged


def step(tape: Tape, source: Value, width: float, *, saved: bool = True) -> Value:
    """A pointwise operation with an output of its own."""
    out = tape.tensor(width, 2)
    tape.record(out, [source], saved=[source] if saved else [])
    return out


def largest(moments: list[Moment], *, tokens: int = 1000) -> float:
    return max(moment.size.fixed + tokens * moment.size.per_token for moment in moments)


def test_terms_are_added_up_row_by_row() -> None:
    left = {Term.WEIGHTS: fixed(3), Term.LOGITS: per_token(2)}
    right = {Term.LOGITS: per_token(5), Term.INPUTS: per_token(1)}
    assert merged(left, right, {}) == {
        Term.WEIGHTS: fixed(3),
        Term.LOGITS: per_token(7),
        Term.INPUTS: per_token(1),
    }
    assert merged() == {}


def test_what_is_kept_is_told_apart_by_term() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    mask = tape.tensor(10, 1, term=Term.DROPOUT_MASKS, requires_grad=False)
    scores = tape.tensor(0, 2, size=per_score(12), term=Term.ATTENTION_SCORES)
    out = tape.tensor(10, 2)
    tape.record(out, [source, scores], saved=[mask, scores, source])
    assert tape.saved(without=out) == {
        Term.SAVED_ACTIVATIONS: per_token(20),
        Term.DROPOUT_MASKS: per_token(10),
        Term.ATTENTION_SCORES: per_score(12),
    }


def test_what_is_counted_elsewhere_is_not_counted_here() -> None:
    tape = Tape()
    source = tape.tensor(10, 2, counted=False)
    out = step(tape, source, 10)
    assert tape.saved(without=out) == {}
    assert tape.saves(source)


def test_a_tensor_may_be_kept_to_the_end_without_being_saved() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    out = step(tape, source, 10, saved=False)
    assert tape.saved(without=out) == {}
    tape.keep(source)
    assert tape.saved(without=out) == {Term.SAVED_ACTIVATIONS: per_token(20)}
    tape.keep(out)
    assert tape.saved(without=out) == {Term.SAVED_ACTIVATIONS: per_token(20)}


def test_saved_tensors_go_one_after_the_other_from_the_back() -> None:
    tape = Tape()
    first = tape.tensor(100, 2)
    second = step(tape, first, 30)
    third = step(tape, second, 20)
    moments, _ = tape.walk(third)
    # the last operation holds both inputs (200, 60), its output's gradient (40) and its own (60);
    # the first then holds its input (200) and two gradients (60, 200)
    assert largest(moments) == 1000 * max(200 + 60 + 40 + 60, 200 + 60 + 200)


def test_a_gradient_that_is_passed_on_is_no_second_tensor() -> None:
    moments = {}
    for passes in (True, False):
        tape = Tape()
        source = tape.tensor(10, 2)
        out = tape.tensor(10, 2)
        tape.record(out, [source], passed=[source] if passes else [])
        moments[passes], _ = tape.walk(out)
    assert largest(moments[True]) == 1000 * 20
    assert largest(moments[False]) == 1000 * 40


def test_a_second_gradient_of_a_tensor_is_added_to_the_first() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    stem = step(tape, source, 10, saved=False)
    left, right = step(tape, stem, 10, saved=False), step(tape, stem, 10, saved=False)
    out = tape.tensor(10, 2)
    tape.record(out, [left, right], passed=[left, right])
    moments, _ = tape.walk(out)
    # out's gradient, shared by both sides, and one for the stem; then one more for the other side
    assert largest(moments) == 1000 * 60


def test_temporaries_live_for_one_operation() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    out = tape.tensor(10, 2)
    tape.record(out, [source], temporary=per_token(500))
    last = step(tape, out, 10, saved=False)
    moments, _ = tape.walk(last)
    assert largest(moments) == 1000 * (20 + 20 + 500)


def test_gradients_of_parameters_stay_and_are_a_term_of_their_own() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    first, second = (tape.parameter(100, 4, requires_grad=True) for _ in range(2))
    middle, out = tape.tensor(10, 2), tape.tensor(10, 2)
    tape.record(middle, [source, first], saved=[source])
    tape.record(out, [middle, second], saved=[middle])
    moments, gradients = tape.walk(out)
    assert gradients == fixed(800)
    # while the first runs, the second's gradient is there already
    assert any(moment.terms.get(Term.UNSHARDED_GRADIENTS) == fixed(400) for moment in moments)


def test_a_branch_that_no_gradient_reaches_does_not_run() -> None:
    tape = Tape()
    source = tape.tensor(10, 2)
    step(tape, source, 1000)
    out = step(tape, source, 10, saved=False)
    moments, gradients = tape.walk(out)
    assert gradients == ZERO
    assert all(Term.ACTIVATION_GRADIENTS in moment.terms for moment in moments)
    assert max(moment.terms[Term.ACTIVATION_GRADIENTS].per_token for moment in moments) == 40


def test_no_gradient_flows_through_what_comes_from_constants() -> None:
    tape = Tape()
    constant = tape.tensor(10, 2, requires_grad=False)
    derived = step(tape, constant, 10)
    weight = tape.parameter(100, 2, requires_grad=True)
    out = tape.tensor(10, 2)
    tape.record(out, [derived, weight], saved=[derived])
    moments, gradients = tape.walk(out)
    assert not tape.needs_gradient(derived)
    assert gradients == fixed(200)
    # kept 20, gradient of the output 20, gradient of the weight 200; none of the input
    assert largest(moments) == 1000 * 40 + 200
