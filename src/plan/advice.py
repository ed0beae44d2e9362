"""What to change: each piece of advice recomputed, with what it saves and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product

from src.architecture import Decoder, describe
from src.errors import UserError
from src.plan.changes import Change, both, faster, leaner
from src.plan.checks import check
from src.plan.layouts import candidates
from src.plan.pace import estimators_pace
from src.plan.result import Advice
from src.plan.search import Estimator, largest_micro_batch, verdict
from src.plan.throughput import tokens_per_second
from src.spec import Request, Step, Verdict

MOST_LINES = 8
"""Pieces of advice that are told."""

PAIRED = 6
"""Kinds of change that are tried in pairs: those that save most alone."""

GOALS = frozenset({"gpus", "seq_len"})
"""Kinds that ask for more than the job's own settings: they are paired last."""

COSTLY = GOALS | {"finetune"}
"""Where only these are enough, pairs are tried too: some want to train every weight."""

LEAST_SPEEDUP = 0.03
"""Speedups smaller than this are not told: the model of time cannot tell them from none."""


def advise(request: Request, estimator: Estimator) -> tuple[Advice, ...]:
    """Advice for a request: what makes it fit, or, where it fits, what makes it faster.

    Of what makes it fit, changes that cost least time come first, more GPUs last; pairs are tried
    where no single setting is enough. Every number is the estimator's for the changed request: for
    the fastest method that fits, else the one that needs least; at the micro batch asked for, else
    at 1, or at the largest where the job fits.
    """
    adviser = _Adviser(request, estimator)
    if adviser.base is None:
        return ()
    if _fits(adviser.base):
        return adviser.speedups()
    return adviser.savings()


class _Adviser:
    def __init__(self, request: Request, estimator: Estimator) -> None:
        self._request = request
        self._estimator = estimator
        self._decoder: Decoder = describe(request.job.model)
        self._pace = estimators_pace(estimator)
        self._at_largest = False
        self.base: Advice | None = None
        self.base = self._try(Change("", "", request))

    def savings(self) -> tuple[Advice, ...]:
        """Changes after which the job fits; the nearest ones where none is enough."""
        kinds: dict[str, list[Change]] = {}
        for change in leaner(self._request):
            kinds.setdefault(change.kind, []).append(change)
        tried = {kind: best for kind in kinds if (best := self._smallest(kinds[kind])) is not None}
        fitting = {kind: advice for kind, advice in tried.items() if _fits(advice)}
        short = sorted(tried.keys() - fitting.keys(), key=lambda kind: -tried[kind].saved_bytes)
        told = list(fitting.values())
        if fitting.keys() <= COSTLY:
            settings = [kind for kind in short if kind not in GOALS]
            told += self._pairs(combinations(settings[:PAIRED], 2), kinds, tried)
        if not told:
            goals = (pair for pair in combinations(short[:PAIRED], 2) if GOALS & set(pair))
            told = self._pairs(goals, kinds, tried)
        nearest = [tried[kind] for kind in short[:2]]
        return tuple(sorted(told or nearest, key=_by_cost)[:MOST_LINES])

    def _smallest(self, changes: Iterable[Change]) -> Advice | None:
        """The first change that makes it fit, else the one that saves most; None if none saves."""
        found: Advice | None = None
        for change in changes:
            advice = self._try(change)
            if advice is None or advice.saved_bytes <= 0:
                continue
            if _fits(advice):
                return advice
            if found is None or advice.saved_bytes > found.saved_bytes:
                found = advice
        return found

    def _pairs(
        self,
        pairs: Iterable[tuple[str, str]],
        kinds: dict[str, list[Change]],
        tried: dict[str, Advice],
    ) -> list[Advice]:
        """Of two kinds each, the first two changes that make it fit together.

        None where not even those two do that save most alone.
        """
        strongest = {
            change.kind: change
            for kind, advice in tried.items()
            for change in kinds[kind]
            if change.words == advice.changes
        }
        found = []
        for first, second in pairs:
            if self._first_that_fits([(strongest[first], strongest[second])]) is None:
                continue
            advice = self._first_that_fits(product(kinds[first], kinds[second]))
            if advice is not None:
                found.append(advice)
        return found

    def _first_that_fits(self, pairs: Iterable[tuple[Change, Change]]) -> Advice | None:
        for first, second in pairs:
            change = both(first, second, self._request)
            advice = None if change is None else self._try(change)
            if advice is not None and _fits(advice):
                return advice
        return None

    def speedups(self) -> tuple[Advice, ...]:
        """Changes after which it still fits and is faster; the fastest of each kind."""
        self._at_largest = self._request.micro_batch is None
        self.base = None
        self.base = self._try(Change("", "", self._request))
        best: dict[str, Advice] = {}
        for change in faster(self._request):
            advice = self._try(change)
            if advice is None or not _fits(advice):
                continue
            known = best.get(change.kind)
            is_faster = advice.time_ratio <= 1 - LEAST_SPEEDUP
            if is_faster and (known is None or advice.time_ratio < known.time_ratio):
                best[change.kind] = advice
        return tuple(sorted(best.values(), key=_by_time)[:MOST_LINES])

    def _try(self, change: Change) -> Advice | None:
        """The changed request's best row; None where it is impossible or not known."""
        request = change.request
        if request.job.model is not self._request.job.model:
            return None
        rows = []
        try:
            check(request, self._decoder)
            found = candidates(request, self._decoder)
        except UserError:
            return None
        for candidate in found:
            step = Step(
                job=request.job,
                method=candidate.method,
                layout=candidate.layout,
                gpu=request.cluster.gpu,
                micro_batch=request.micro_batch or 1,
            )
            try:
                if self._at_largest:
                    largest = largest_micro_batch(step, self._estimator)
                    step = replace(step, micro_batch=max(largest, 1))
                rows.append(self._row(change, request, step))
            except UserError:
                continue
        if not rows:
            return None
        return min(rows, key=_best)

    def _row(self, change: Change, request: Request, step: Step) -> Advice:
        estimate = self._estimator(step)
        upper = estimate.upper_bytes.device
        seconds = 1 / tokens_per_second(step, request.cluster, self._decoder, self._pace)
        advice = Advice(
            changes=change.words,
            method=step.method,
            layout=step.layout,
            micro_batch=step.micro_batch,
            upper_bytes=upper,
            saved_bytes=0,
            seconds_per_token=seconds,
            time_ratio=1.0,
            verdict=verdict(estimate, step.gpu),
        )
        if self.base is None:
            return advice
        return replace(
            advice,
            saved_bytes=self.base.upper_bytes - upper,
            time_ratio=seconds / self.base.seconds_per_token,
        )


def _fits(advice: Advice) -> bool:
    return advice.verdict is Verdict.FITS


def _best(advice: Advice) -> tuple[bool, float, int]:
    """The fastest that fits; else the one that needs least."""
    fits = _fits(advice)
    return not fits, advice.seconds_per_token if fits else 0.0, advice.upper_bytes


def _by_time(advice: Advice) -> tuple[float, int]:
    return advice.time_ratio, advice.upper_bytes


def _by_cost(advice: Advice) -> tuple[bool, bool, float, int]:
    """More GPUs always take less time per token: that is what they cost, not what they save."""
    return not _fits(advice), "gpus=" in advice.changes, *_by_time(advice)
