"""Plans of sparse jobs: the cheapest or fastest number of functions and shards within the limits.

The batch size is the job's, as it changes what is learned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ephemeron.config.typed import plain
from ephemeron.errors import PlanInfeasible
from ephemeron.functions.local import default_limits, default_memory_mb
from ephemeron.sparse.job.prediction import SparsePrediction
from ephemeron.sparse.job.predictor import SparsePredictor
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.sparse_spec import BATCH_SIZE
from ephemeron.training.planner import PlanLimits
from ephemeron.units import duration

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHARDS = (1, 2, 4, 8)
PER_CORE = 8
"""Functions for each core of this machine that are tried; more only wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCandidate:
    """A number of functions and shards, and what it would take."""

    workers: int
    shards: int
    memory_mb: int
    predicted: SparsePrediction
    within_limits: bool

    @property
    def text(self) -> str:
        """`2 functions of 1,024 MB and 1 shard`."""
        many, shards = "s" * (self.workers > 1), "s" * (self.shards > 1)
        return f"{self.workers} function{many} of {self.memory_mb:,} MB and {self.shards} shard{shards}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePlan:
    """The best number of functions and shards of a sparse job, and all that were compared."""

    job: str
    batch_size: int
    epochs: int
    objective: Literal["cost", "time"]
    deadline_s: float | None
    budget_usd: float | None
    choice: SparseCandidate
    candidates: tuple[SparseCandidate, ...]
    """By number of shards, then of functions."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """What `ephemeron plan --json` prints of a sparse job: the fields of the choice and of the plan in one table, as of other plans."""
        table = plain(self)
        return json.dumps({**table.pop("choice"), **table})

    def save(self, path: Path) -> None:
        """Writes `plan.json`."""
        path.write_text(json.dumps(json.loads(self.to_json()), indent=2) + "\n")


def plan_of(predictor: SparsePredictor, job: Job, c: Configuration) -> SparsePlan:
    """The plan of a run whose number of functions is given: its prediction, and nothing to compare it with.

    Raises:
        JobError: the job is refused.
    """
    assert job.sparse is not None
    p, budget = predictor.predicted(job, c), job.limits.budget_usd
    choice = SparseCandidate(
        workers=c.workers,
        shards=len(job.sparse.store) or job.sparse.shards,
        memory_mb=c.memory_mb,
        predicted=p,
        within_limits=budget is None or p.cost_usd <= budget,
    )
    return SparsePlan(
        job=job.name,
        batch_size=c.batch_size,
        epochs=job.epochs,
        objective="cost",
        deadline_s=job.limits.deadline_s,
        budget_usd=budget,
        choice=choice,
        candidates=(choice,),
        notes=predictor.notes(c.batch_size),
    )


def make_sparse_plan(
    predictor: SparsePredictor,
    job: Job,
    limits: PlanLimits,
    *,
    objective: Literal["cost", "time"] = "cost",
    shards: Sequence[int] = SHARDS,
    configured: Callable[..., Configuration],
    function_timeout_s: float | None = None,
) -> SparsePlan:
    """The cheapest, or fastest, number of functions and shards within the limits, of all that are tried.

    Args:
        predictor: of the job.
        job: with a table `[sparse]`.
        limits: deadline and budget.
        objective: what to minimise.
        shards: numbers to try; a store that is given counts as it is.
        configured: makes the configuration of a job with options, as `training.driver.api.configure` does.
        function_timeout_s: time limit of an invocation; None: the job's.

    Raises:
        PlanInfeasible: nothing is within the limits; the message names the nearest.
        JobError: the job is refused.
    """
    assert job.sparse is not None
    tried = (len(job.sparse.store),) if job.sparse.store else tuple(shards)
    found: list[SparseCandidate] = []
    batch_size = int(job.run.get("batch_size", BATCH_SIZE))  # type: ignore[call-overload]
    rows = predictor.work(job).rows
    limit = default_limits()
    most = min(limit.concurrency, PER_CORE * (os.cpu_count() or 1), sum(-(-count // batch_size) for count in rows))
    for count in tried:
        variant = job if job.sparse.store else replace(job, sparse=replace(job.sparse, shards=count))
        for workers in (w for w in WORKERS if w <= most):
            memory_mb = int(job.run.get("memory_mb") or default_memory_mb(workers))  # type: ignore[call-overload]
            if workers > 1 and workers * memory_mb > limit.memory_max_mb:
                continue
            c = configured(variant, workers=workers, memory_mb=memory_mb, function_timeout_s=function_timeout_s)
            p = predictor.predicted(variant, c)
            within = p.seconds <= limits.seconds and p.cost_usd <= limits.usd
            found.append(SparseCandidate(workers=workers, shards=count, memory_mb=c.memory_mb, predicted=p, within_limits=within))
    allowed = [each for each in found if each.within_limits]
    if not allowed:
        raise _infeasible(found, limits)
    return SparsePlan(
        job=job.name,
        batch_size=batch_size,
        epochs=job.epochs,
        objective=objective,
        deadline_s=limits.deadline_s,
        budget_usd=limits.budget_usd,
        choice=min(allowed, key=_key(objective)),
        candidates=tuple(found),
        notes=predictor.notes(batch_size),
    )


def _key(objective: Literal["cost", "time"]) -> Callable[[SparseCandidate], tuple[float, float]]:
    if objective == "cost":
        return lambda c: (c.predicted.cost_usd, c.predicted.seconds)
    return lambda c: (c.predicted.seconds, c.predicted.cost_usd)


def _infeasible(found: Sequence[SparseCandidate], limits: PlanLimits) -> PlanInfeasible:
    """Which limit forbids all candidates, and the nearest of them."""
    cheapest, fastest = min(found, key=_key("cost")), min(found, key=_key("time"))
    if limits.budget_usd is not None and cheapest.predicted.cost_usd > limits.usd:
        return PlanInfeasible(
            f"the budget of ${limits.budget_usd:g} is too small: the cheapest is {_told(cheapest)}; allow more, or train fewer epochs",
            binding="budget",
        )
    if limits.deadline_s is not None and fastest.predicted.seconds > limits.seconds:
        return PlanInfeasible(
            f"the deadline of {duration(limits.deadline_s)} cannot be met: the nearest is {_told(fastest)}; allow more time, "
            "or train fewer epochs or with a larger batch_size",
            binding="deadline",
        )
    return PlanInfeasible(
        f"deadline and budget exclude each other: the cheapest is {_told(cheapest)}, the fastest {_told(fastest)}", binding="budget"
    )


def _told(c: SparseCandidate) -> str:
    return f"{c.text}, {duration(c.predicted.seconds)} for ${c.predicted.cost_usd:.4g}"
