"""The whole question: a job, a cluster, and which methods to compare."""

from __future__ import annotations

from dataclasses import dataclass

from src.errors import UserError
from src.spec.choices import EstimatorKind, Method, Policy, Runtime, Unknown
from src.spec.hardware import Cluster
from src.spec.job import Job, require_positive
from src.spec.lengths import Lengths

MOST_SEQUENCES = 1 << 20
"""Sequences of a micro batch: beyond, no GPU has room for their token ids."""

DRY_RUN_LIMIT_S = 120
"""Seconds that one dry run may take unless asked otherwise; the largest models take about 15."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `src.estimate` is asked.

    Attributes:
        job: the job.
        cluster: where it runs.
        methods: the methods to compare; empty: every method that is possible there.
        tp: tensor-parallel degree; None: every degree that is possible.
        micro_batch: sequences per GPU per forward pass; None: the largest that fits, per method.
        estimator: who answers.
        lengths: lengths of the sequences, of which `job.seq_len` is the longest; None: all of that
            length.
        solve: the field that is left open; None: none.
        policy: what is recommended of what fits.
    """

    job: Job
    cluster: Cluster
    methods: tuple[Method, ...] = ()
    tp: int | None = None
    micro_batch: int | None = None
    estimator: EstimatorKind = EstimatorKind.AUTO
    lengths: Lengths | None = None
    policy: Policy = Policy.FASTEST
    solve: Unknown | None = None

    @property
    def runtime(self) -> Runtime:
        """What runs the step: only LLMem's formulas speak of Gemini, and of nothing else."""
        is_llmem = self.estimator is EstimatorKind.LLMEM
        return Runtime.GEMINI if is_llmem else Runtime.PYTORCH

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            require_positive("micro_batch", self.micro_batch)
            if self.micro_batch > MOST_SEQUENCES:
                allowed = f"1 to {MOST_SEQUENCES:,}"
                raise UserError(key="micro_batch", value=self.micro_batch, allowed=allowed)
        if self.tp is not None:
            require_positive("tp", self.tp)
            if self.tp > self.cluster.num_gpus:
                raise UserError(
                    key="tp", value=self.tp, allowed=f"at most gpus={self.cluster.num_gpus}"
                )
