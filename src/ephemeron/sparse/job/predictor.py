"""Predictions of sparse jobs on this machine: what `ephemeron train`, `predictor` and `tune` ask before a start.

The profile of a job is kept in the home folder under a digest of what the time of its steps depends on, so that the second
command measures nothing.

Plans of sparse jobs: the cheapest or fastest number of functions and shards within the limits.

The batch size is the job's, as it changes what is learned.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import xxhash

from ephemeron.config.typed import plain
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.base import Limits
from ephemeron.functions.local import default_limits, default_memory_mb
from ephemeron.prices import Prices, load_prices
from ephemeron.runs import folders
from ephemeron.runs.predictions import Basis, Prediction, price_basis
from ephemeron.sparse.job.prediction import (
    SparseConfiguration,
    SparsePrediction,
    SparseProfile,
    SparseWork,
    StepCosts,
    load_sparse_profile,
    predict,
)
from ephemeron.sparse.job.preparing import opened_dataset, urls_of
from ephemeron.training.driver.launching.launch import LaunchRequest, prepared_run
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.sparse_spec import BATCH_SIZE
from ephemeron.training.planner import PlanLimits
from ephemeron.training.profiling.store import this_machine
from ephemeron.units import duration, human_usd

_log = logging.getLogger(__name__)

_FREE_OPTIONS = ("l2",)
"""Options of models that the time of a step does not depend on."""
OnProgress = Callable[[str], None]


@dataclass(slots=True)
class SparsePredictor:
    """Predictions of sparse runs on this machine, from one profile.

    Args:
        profile: of the job, or of one whose steps take as long.
        prices_file: price file instead of the built-in one.
    """

    profile: SparseProfile
    prices_file: Path | None = None
    _steps: StepCosts = field(init=False)
    prices: Prices = field(init=False)
    _datasets: dict[str, TableDataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._steps, self.prices = self.profile.costs(), load_prices("objects", self.prices_file, servers=True)

    def predicted(self, job: Job, c: Configuration) -> SparsePrediction:
        """Time and cost of a run to its end.

        Raises:
            JobError: the platform cannot be predicted, or the job has no dataset.
        """
        assert job.sparse is not None
        check_platform(c.platform)
        s = job.sparse
        return predict(
            self._steps,
            self.profile.run,
            self.work(job),
            SparseConfiguration(
                workers=c.workers,
                shards=len(s.store) or s.shards,
                servers=0 if s.store else s.shards,
                batch_size=c.batch_size,
                memory_mb=c.memory_mb,
                lifetime_s=c.function_timeout_s or Limits().lifetime_s,
                mb_per_vcpu=Limits().mb_per_vcpu,
                cores=float(os.cpu_count() or 1),
            ),
            self.prices,
        )

    def work(self, job: Job) -> SparseWork:
        """What a job trains on.

        Raises:
            JobError: it has no dataset.
        """
        train, test = urls_of(job)
        return SparseWork(
            rows=tuple(p.rows for p in self._dataset(train).partitions),
            epochs=job.epochs,
            test_rows=0 if test is None else len(self._dataset(test)),
        )

    def _dataset(self, url: str) -> TableDataset:
        if url not in self._datasets:
            self._datasets[url] = opened_dataset(url)
        return self._datasets[url]

    @property
    def rests_on(self) -> tuple[Basis, ...]:
        """What predictions rest on."""
        p = self.profile
        steps = Basis(source="profile", what=f"steps of {p.program}, measured on {p.machine}", as_of=p.measured_on)
        return steps, price_basis(self.prices)

    def notes(self, batch_size: int) -> tuple[str, ...]:
        """What to know of a prediction."""
        low, high = self.profile.batches
        found = []
        if not low <= batch_size <= high:
            found.append(f"batch_size = {batch_size} is outside of what was measured, {low} to {high} samples: extrapolated")
        if self._steps.pace >= 1.5:
            found.append(
                f"the machine was busy when it was measured (load {self.profile.load_average:g}): steps took {self._steps.pace:.1f} "
                "times their CPU time, and are predicted to do so again; ephemeron plan JOB --no-cache measures anew"
            )
        return tuple(found)


def sparse_predictor(
    job: Job,
    *,
    platform: str = "local",
    profile: Path | None = None,
    use_cache: bool = True,
    prices_file: Path | None = None,
    measures: bool = True,
    on_progress: OnProgress = lambda text: None,
) -> SparsePredictor:
    """Predictions of a job, from its profile, which is measured if it is not known.

    Args:
        job: with a table `[sparse]`.
        platform: where it is to run; only `local` can be predicted.
        profile: file instead of the stored profile or a measurement.
        use_cache: use the stored profile; False: measure again.
        prices_file: price file instead of the built-in one.
        measures: whether a profile that is not known is measured.
        on_progress: told what is measured.

    Raises:
        JobError: the job, the platform or the file is refused; or no profile is known, and `measures` is not set.
    """
    check_platform(platform)
    if profile is not None:
        return SparsePredictor(load_sparse_profile(profile), prices_file)
    known = stored_profile(job) if use_cache else None
    if known is None:
        if not measures:
            raise JobError(f"job {job.name!r}, as it is now, has no profile; one is measured from some steps of it on this machine")
        from ephemeron.sparse.job.profiling import measure

        on_progress("measuring steps of this sparse job on this machine, once")
        known = measure(job, on_progress=on_progress)
        known.save(profile_path(job))
    return SparsePredictor(known, prices_file)


def predict_run(request: LaunchRequest, on_progress: OnProgress) -> Prediction:
    """What a run of a sparse job will take. The job is measured, if it was not before.

    Args:
        request: the run.
        on_progress: told what is measured.

    Raises:
        UserError: what `train` would refuse, or the platform cannot be predicted.
    """
    job, ready = request.job, prepared_run(request)
    c = ready.prepared.spec.configuration
    predictor = sparse_predictor(job, platform=c.platform, prices_file=request.prices_file, on_progress=on_progress)
    p = predictor.predicted(job, c)
    found = Prediction(
        kind="sparse",
        name=job.name,
        platform=c.platform,
        seconds=p.seconds,
        cost_usd=p.cost_usd,
        quota_mb=c.memory_mb,
        functions=c.workers,
        invocations=p.invocations,
        rests_on=predictor.rests_on,
        notes=predictor.notes(c.batch_size),
        details={"configuration": plain(c), "predicted": plain(p)},
        rows=(
            ("steps", f"{p.steps_per_s:,.0f} a second, bounded by {p.bottleneck}"),
            ("of the cost", f"functions {human_usd(p.functions_usd)}, shards {human_usd(p.servers_usd)}"),
        ),
    )
    return found.within(budget_usd=job.limits.budget_usd, deadline_s=job.limits.deadline_s)


def check_platform(platform: str) -> None:
    """Refuses platforms on which a sparse job cannot be predicted.

    Raises:
        JobError: it is not this machine.
    """
    if platform != "local":
        raise JobError(
            f"a sparse job cannot be profiled or predicted on platform {platform}",
            remedy="use --platform local, or choose workers and batch_size in [run]",
        )


def profile_path(job: Job) -> Path:
    """Path of a job's stored profile."""
    return folders.home() / "profiles" / f"{job.name}-sparse-{digest(job)}.json"


def stored_profile(job: Job) -> SparseProfile | None:
    """The profile of a job that was measured on this machine before; None: there is none."""
    path = profile_path(job)
    if not path.exists():
        return None
    try:
        found = load_sparse_profile(path)
    except JobError as e:
        _log.info("not using %s: %s", path, e)
        return None
    return found if found.machine == this_machine() else None


def digest(job: Job) -> str:
    """Digest of what the time of a step depends on.

    Raises:
        JobError: the job has no dataset.
    """
    assert job.sparse is not None
    s, (train, test) = job.sparse, urls_of(job)
    options = {key: value for key, value in s.model.options.items() if key not in _FREE_OPTIONS}
    data = opened_dataset(train)
    parts = (
        s.model.target,
        sorted(options.items(), key=str),
        s.optimizer.target,
        s.ring,
        s.threshold,
        s.values,
        data.url,
        [p.rows for p in data.partitions],
        test,
    )
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())


# -- plans of sparse jobs -----------------------------------------------------------------------------------------


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
