"""Changes of a run's functions, checked before anything is started or asked for."""

from __future__ import annotations

from ephemeron.errors import JobError
from ephemeron.functions.base import Call, Limits
from ephemeron.training.driver.launching.admission import check_call
from ephemeron.training.job import sync_name
from ephemeron.training.job.generation import Generation, Resize, check_schedule
from ephemeron.training.worker.spec import RunSpec


def refuse_resizes(spec: RunSpec) -> None:
    """Refuses changes for runs whose functions cannot change.

    Raises:
        JobError: names what excludes them.
    """
    c = spec.configuration
    reason = ""
    if spec.stages is not None or c.stages.count > 1:
        reason = "a model on several functions"
    elif spec.script is not None:
        reason = "a script with a loop of its own"
    elif c.pattern in ("parameter-server", "standalone"):
        reason = f"pattern '{c.pattern}'"
    elif c.resize.asks and sync_name(c.sync)[0] == "asp":
        reason = "sync 'asp', whose functions agree on no iteration"
    if reason:
        raise JobError(f"the functions of a run cannot change with {reason}", remedy="start another run from its weights (init)")


def check_resizes(spec: RunSpec, limits: Limits) -> None:
    """Refuses a schedule of changes that cannot be carried out.

    Raises:
        JobError, PlanInfeasible: names the change.
    """
    entries, c = spec.configuration.resize.schedule, spec.configuration
    if entries or c.resize.asks:
        refuse_resizes(spec)
    if c.resize.policy is not None and c.resize.adapt:
        raise JobError("both resize.policy and resize.adapt decide on the functions", remedy="use one of them")
    if c.resize.adapt and spec.deadline_s is None and spec.budget_usd is None:
        raise JobError("resize.adapt = true needs something to keep", remedy="give limits.deadline_s or limits.budget_usd")
    if not entries:
        return
    check_schedule(entries, epochs=spec.epochs)
    while (following := spec.scheduled) is not None:
        check_generation(spec, following, limits)
        spec = spec.in_generation(following)


def check_generation(spec: RunSpec, following: Generation, limits: Limits) -> None:
    """Refuses a generation whose functions the platform does not start, or that has too few samples.

    Raises:
        JobError, PlanInfeasible: names what binds.
    """
    c = spec.configuration
    spec.in_generation(following).check_shares()
    check_call(
        Call(run=spec.run_id, rank=0, attempt=0, memory_mb=following.memory_mb, lifetime_s=c.function_timeout_s, channel=c.channel),
        workers=following.workers,
        limits=limits,
    )


def check_request(spec: RunSpec, resize: Resize, limits: Limits) -> None:
    """Refuses a request that a run cannot carry out.

    Args:
        spec: of the run, in its current generation.
        resize: what is to change.
        limits: of the platform.

    Raises:
        JobError, PlanInfeasible: names what binds.
    """
    refuse_resizes(spec)
    if sync_name(spec.configuration.sync)[0] == "asp":
        raise JobError("the functions of a run with sync 'asp' agree on no iteration", remedy="use a schedule, or sync hsp")
    changes = spec.resized(resize, spec.current_generation.from_iteration)
    now = spec.current_generation
    names = ("workers", "memory_mb", "aggregators", "batch_size", "nonaggregator_batch_size")
    if all(getattr(changes, name) == getattr(now, name) for name in names):
        raise JobError("the run has these functions already", remedy="give another number of workers, or another memory")
    check_generation(spec, changes, limits)
