"""One field left open: the largest (or smallest) value with which the job still fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from src.architecture import Decoder, Positions, describe
from src.errors import NotCoveredError, UserError
from src.plan.compare import compare
from src.plan.layouts import Candidate, candidates
from src.plan.result import Report, Solution, Solved
from src.plan.search import Estimator, largest_that_fits, verdict
from src.spec import Cluster, EstimatorKind, Gpu, Layout, Method, Request, Step, Unknown, Verdict

LONGEST = 1 << 22
HIGHEST_RANK = 1 << 14
MOST_GPUS = 1024
MOST_GPUS_EACH = 64
"""Where the searches stop: tokens, LoRA's rank, GPUs; GPUs of each model of `solve=gpu`."""

LEANEST_FIRST = (Method.FSDP, Method.ZERO3, Method.FSDP_TP, Method.TP, Method.SINGLE)
"""Methods tried first where any method will do."""


def solve(key: Unknown, request: Request, estimator: Estimator, gpus: Iterable[Gpu]) -> Solved:
    """Find the open field of a request.

    Args:
        key: the open field; its value in the request is not looked at.
        request: everything else.
        estimator: who decides what fits.
        gpus: the GPU models that `solve=gpu` looks at.

    Raises:
        UserError: the field has no meaning for the job, or the request is impossible.
    """
    search = _Search(request, estimator)
    if key is Unknown.GPU:
        found = [search.fewest(gpu) for gpu in gpus]
    elif key is Unknown.GPUS:
        found = search.fewest_per_method()
    else:
        found = search.largest(key)
    smallest = key in (Unknown.GPU, Unknown.GPUS)
    found.sort(key=lambda solution: _rank(solution, smallest=smallest))
    return Solved(key=key, solutions=tuple(found))


def compare_solved(
    request: Request, estimator: Estimator, gpus: Sequence[Gpu], *, kind: EstimatorKind
) -> Report:
    """The answer to a request with `solve`: the open field found, the rest compared with it.

    Where nothing fits at any value, the request is compared as it stands.

    Args:
        request: the request; `request.solve` is its open field.
        estimator: who answers.
        gpus: the GPU models that `solve=gpu` looks at.
        kind: the estimator's name.

    Raises:
        UserError: as `solve` and `compare`.
    """
    assert request.solve is not None
    solved = solve(request.solve, request, estimator, gpus)
    if solved.best is not None:
        gpu = next((gpu for gpu in gpus if gpu.sku == solved.best.gpu), request.cluster.gpu)
        request = with_solution(request, request.solve, solved.best, gpu)
    return replace(compare(request, estimator, kind=kind), solved=solved)


def with_solution(request: Request, key: Unknown, solution: Solution, gpu: Gpu) -> Request:
    """The request with the open field filled in."""
    value = solution.value
    assert value is not None
    if key is Unknown.MICRO_BATCH:
        return replace(request, micro_batch=value)
    if key is Unknown.SEQ_LEN:
        return replace(request, job=replace(request.job, seq_len=value), lengths=None)
    if key is Unknown.LORA_R:
        finetune = replace(request.job.finetune, r=value)
        return replace(request, job=replace(request.job, finetune=finetune))
    return replace(request, cluster=_cluster(request.cluster, gpu, value))


def _rank(solution: Solution, *, smallest: bool) -> tuple[bool, int, int]:
    value = solution.value or 0
    return solution.value is None, value if smallest else -value, solution.upper_bytes or 0


def _cluster(cluster: Cluster, gpu: Gpu, num_gpus: int) -> Cluster:
    """So many GPUs of a model, in nodes of its usual size (or of the size asked for)."""
    per_node = cluster.gpus_per_node if gpu == cluster.gpu else gpu.gpus_per_node
    return replace(cluster, gpu=gpu, num_gpus=num_gpus, gpus_per_node=per_node)


def cluster_sizes(per_node: int, most: int) -> list[int]:
    """Every size up to a node, then whole nodes."""
    within = list(range(1, min(per_node, most) + 1))
    return within + list(range(2 * per_node, most + 1, per_node))


class _Search:
    def __init__(self, request: Request, estimator: Estimator) -> None:
        self._request = request
        self._estimator = estimator
        self._decoder: Decoder = describe(request.job.model)

    def largest(self, key: Unknown) -> list[Solution]:
        """The largest value per method and layout."""
        limit = self._limit(key)
        found = []
        for candidate in candidates(self._request, self._decoder):

            def fits(value: int, candidate: Candidate = candidate) -> bool:
                return self._upper(self._step(key, value, candidate)) is not None

            try:
                value = largest_that_fits(fits, limit)
            except NotCoveredError:
                continue
            step = self._step(key, max(value, 1), candidate)
            found.append(
                Solution(
                    gpu=step.gpu.sku,
                    num_gpus=step.layout.num_gpus,
                    method=candidate.method,
                    layout=candidate.layout,
                    value=value or None,
                    upper_bytes=self._upper(step) if value else None,
                    is_limit=value == limit,
                )
            )
        return found

    def _limit(self, key: Unknown) -> int:
        if key is Unknown.LORA_R:
            if not self._request.job.finetune.is_lora:
                kind = self._request.job.finetune.kind
                allowed = f"only with finetune=lora or qlora, not {kind}"
                raise UserError(key="solve", value=key, allowed=allowed)
            return HIGHEST_RANK
        if key is Unknown.SEQ_LEN:
            learned = self._decoder.positions is Positions.LEARNED
            return (self._decoder.max_positions if learned else None) or LONGEST
        return LONGEST

    def _step(self, key: Unknown, value: int, candidate: Candidate) -> Step:
        job, micro_batch = self._request.job, self._request.micro_batch or 1
        if key is Unknown.MICRO_BATCH:
            micro_batch = value
        elif key is Unknown.SEQ_LEN:
            job = replace(job, seq_len=value)
        else:
            job = replace(job, finetune=replace(job.finetune, r=value))
        return Step(
            job=job,
            method=candidate.method,
            layout=candidate.layout,
            gpu=self._request.cluster.gpu,
            micro_batch=micro_batch,
        )

    def _upper(self, step: Step) -> int | None:
        """The upper bound at the level device of a step that fits; None of one that does not."""
        estimate = self._estimator(step)
        if verdict(estimate, step.gpu) is not Verdict.FITS:
            return None
        return estimate.upper_bytes.device

    def fewest_per_method(self) -> list[Solution]:
        """The fewest GPUs per method."""
        cluster = self._request.cluster
        sizes = cluster_sizes(cluster.gpus_per_node, MOST_GPUS)
        methods = self._request.methods or tuple(Method)
        return [self._fewest(cluster.gpu, sizes, [method]) for method in methods]

    def fewest(self, gpu: Gpu) -> Solution:
        """The fewest GPUs of a model, by whichever method."""
        sizes = cluster_sizes(_cluster(self._request.cluster, gpu, 1).gpus_per_node, MOST_GPUS_EACH)
        methods = self._request.methods or (
            *LEANEST_FIRST,
            *(method for method in Method if method not in LEANEST_FIRST),
        )
        return self._fewest(gpu, sizes, methods)

    def _fewest(self, gpu: Gpu, sizes: Sequence[int], methods: Iterable[Method]) -> Solution:
        """The first size at which one of the methods fits: each up to a node, then by bisection."""
        tried = list(methods)
        per_node = _cluster(self._request.cluster, gpu, 1).gpus_per_node
        within = [size for size in sizes if size <= per_node]
        beyond = [size for size in sizes if size > per_node]
        size = next((size for size in within if self._fitting(gpu, size, tried)), None)
        if size is None and beyond and self._fitting(gpu, beyond[-1], tried):
            low, high = -1, len(beyond) - 1
            while high - low > 1:
                middle = (low + high) // 2
                fits = self._fitting(gpu, beyond[middle], tried) is not None
                low, high = (low, middle) if fits else (middle, high)
            size = beyond[high]
        found = None if size is None else self._fitting(gpu, size, tried)
        if found is None:
            return Solution(
                gpu=gpu.sku,
                num_gpus=sizes[-1],
                method=tried[0],
                layout=Layout(),
                value=None,
                upper_bytes=None,
            )
        candidate, upper = found
        return Solution(
            gpu=gpu.sku,
            num_gpus=candidate.layout.num_gpus,
            method=candidate.method,
            layout=candidate.layout,
            value=candidate.layout.num_gpus,
            upper_bytes=upper,
        )

    def _fitting(
        self, gpu: Gpu, size: int, methods: Iterable[Method]
    ) -> tuple[Candidate, int] | None:
        """The first candidate of the methods that fits on so many GPUs, and its upper bound."""
        cluster = _cluster(self._request.cluster, gpu, size)
        alone = [Method.SINGLE] if size == 1 and not self._request.methods else methods
        for method in alone:
            request = replace(self._request, cluster=cluster, methods=(method,))
            try:
                for candidate in candidates(request, self._decoder):
                    step = self._step(
                        Unknown.MICRO_BATCH, self._request.micro_batch or 1, candidate
                    )
                    upper = self._upper(replace(step, gpu=gpu))
                    if upper is not None:
                        return candidate, upper
            except UserError:
                continue
        return None
