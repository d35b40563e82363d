"""The Python interface to training: `configure`, `train`, `dry_run` and `resize`. The functions block; below them is asyncio.

job = load_job("job.toml")
result = train(job, configure(job, workers=4, sync="hap"))
print(result.summary.metrics, result.summary.cost_usd)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ephemeron import blocking
from ephemeron.communication.channels.address import is_direct
from ephemeron.config.typed import build, near
from ephemeron.errors import JobError, UserError
from ephemeron.functions.registry import CLOUDS
from ephemeron.runs import detached, notebook
from ephemeron.runs.header import RunHeader, open_header
from ephemeron.runs.kinds import load_kind
from ephemeron.runs.labels import check_labels
from ephemeron.training.driver import lifecycle, progress, simulations
from ephemeron.training.driver.launching.launch import LaunchRequest, begun, platform_limits, prepared_run
from ephemeron.training.driver.launching.prepare import refuse_contradictions
from ephemeron.training.driver.launching.programs import job_of
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.result import Result, open_run
from ephemeron.training.driver.run_logging import LoggerChoice
from ephemeron.training.job import Configuration, Fault, Job, RegionPlanMethod
from ephemeron.training.job.former_names import refuse_former_names
from ephemeron.training.job.generation import Generation, Resize
from ephemeron.training.job.precedence import give_way
from ephemeron.training.job.run_options import flat, merged, nested, open_to
from ephemeron.training.job.sparse_job import refuse_runs
from ephemeron.training.job.sparse_spec import BATCH_SIZE
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.planner.plan import StoredPlan
from ephemeron.training.task.task import Task

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings
    from ephemeron.runs.predictions import Prediction

Program: TypeAlias = str | Path | Task | type[Task]
"""Path of a job file or a script, `module:Class`, or a task."""
SIMULATED_MEMORY_MB = 1769


def _checked_configuration(c: Configuration) -> Configuration:
    """The argument of `train`, which must be a configuration."""
    if not isinstance(c, Configuration):
        raise JobError(f"configuration is a {type(c).__name__}", remedy="give what configure(job, …) returns")
    return c


def configure(job: Job | Program, *, on_note: Callable[[str], None] = warnings.warn, **overrides: object) -> Configuration:
    """The configuration of a run: explicit options over those of the job's `[run]` table over defaults of the platform.

    Args:
        job: the job, or the program that `train` takes.
        on_note: called with a line that names values of `[run]` that were left out because explicit options contradict them.
        overrides: explicit options, named as in `Configuration`. None: not given. Of a table that is a mapping, each key overrides
            that of the job, as in `stages={"count": 2}`; one that is a value of its class, such as `StageOptions(count=2)`, replaces
            the job's table.

    Raises:
        JobError: an option is unknown or has a wrong type, a value is out of bounds, or two values contradict each other.
    """
    job = job_of(job)
    explicit = {name: value for name, value in overrides.items() if value is not None}
    refuse_former_names(explicit, where="configuration: ")
    options = [f.name for f in dataclasses.fields(Configuration)]
    for name in explicit:
        if name not in options:
            raise JobError(f"unknown option {name!r}", remedy=near(name, options, what="options", quoted=True))
    build(Configuration, explicit, where="configuration")
    if job.sparse is not None:
        c = configured({"batch_size": BATCH_SIZE, **merged(job.run, explicit)})
        refuse_runs(c)
        return c
    own = open_to(job.run, explicit)
    values, left_out = give_way(own, flat(explicit), lambda values: refuse_contradictions(configured(values)))
    if left_out:
        gone = ", ".join(f"{name} = {own[name]}" for name in left_out)
        on_note(f"left out of the job's [run], because what was given now contradicts it: {gone}")
    return configured(values)


def configured(values: Mapping[str, object]) -> Configuration:
    """A configuration from its options, with the defaults of its platform.

    Args:
        values: as in `Configuration`, tables as mappings, values of their classes or dotted names.
    """
    values = flat(values)
    _count_stages(values)
    _name_regions(values)
    c = build(Configuration, nested(values), where="configuration")
    if c.regions.given:
        return dataclasses.replace(c, workers=sum(group.workers for group in c.regions.region))
    if c.pattern == "standalone" and "workers" not in values:
        c = dataclasses.replace(c, workers=1)
    c = c.resolved()
    limits = platform_limits(c.platform)
    channel = c.channel
    if channel == "folder" and c.pattern == "parameter-server":
        channel = "parameter_server"
    if c.platform == "simulated":
        if channel not in ("folder", "memory", "parameter_server", "direct"):
            raise JobError(f"channel '{channel}' cannot be simulated", remedy="leave --channel out: the simulator has its own")
        channel = channel if channel in ("parameter_server", "direct") else "memory"
    elif channel == "memory":
        raise JobError("channel 'memory' lives in one process and cannot join functions", remedy="use folder")
    if channel == "direct" and c.platform in CLOUDS:
        raise JobError(
            f"with channel 'direct', functions on {c.platform} need a store in which they find each other",
            remedy="write it behind: --channel direct+s3://bucket/prefix",
        )
    if c.direct and (not c.store or is_direct(c.store)):
        raise JobError(f"channel {channel!r} names no store", remedy="write direct, or for example direct+s3://bucket/prefix")
    if c.platform in CLOUDS:  # its function has the memory and the time limit that it was deployed with
        return c
    memory_mb = c.memory_mb
    if not memory_mb:
        from ephemeron.functions.local import default_memory_mb

        memory_mb = SIMULATED_MEMORY_MB if c.platform == "simulated" else default_memory_mb(c.workers)
    return dataclasses.replace(
        c,
        channel=channel,
        memory_mb=memory_mb,
        memory_is_default=not c.memory_mb,
        function_timeout_s=c.function_timeout_s or limits.lifetime_s,
    )


def _name_regions(values: dict[str, object]) -> None:
    """Puts the regions of a file, and how they exchange, in place of its path."""
    plan: RegionPlanMethod | None = values.get("regions.plan")  # type: ignore[assignment]
    path = values.pop("regions.file", None)
    if path is None:
        if plan is not None:
            raise JobError(
                f"regions.plan = '{plan}' is for a file of regions, and there is none",
                remedy="give regions.file, or leave regions.plan out",
            )
        return
    if values.get("regions.region"):
        raise JobError("regions.file and regions.region both name the regions", remedy="leave one of them out")
    found = flat({"regions": load_kind("regions").read_options(str(path), plan)})
    for name in ("regions.store", "regions.least_regions", "regions.replan_every_s"):
        found[name] = values.get(name, found[name])
    values |= found


def _count_stages(values: dict[str, object]) -> None:
    """Adds stages and schedule from a placement, and workers from stages and replicas."""
    if values.get("stages.placement"):
        from ephemeron.training.driver.launching.model_partition import placed_stages

        count, schedule = placed_stages(str(values["stages.placement"]))
        values.setdefault("stages.count", count)
        if "stages.micro_batches" not in values and "stages.schedule" not in values:
            values |= {"stages.micro_batches": schedule.micro_batches, "stages.schedule": schedule.kind}
            values.setdefault("stages.recompute", schedule.recompute)
    if "workers" not in values and ("stages.count" in values or "stages.replicas" in values):
        c = build(Configuration, nested(values), where="configuration")
        values["workers"] = c.stages.count * (c.stages.replicas or 1)


def train(
    job: Job | Program,
    configuration: Configuration | None = None,
    *,
    faults: Sequence[Fault] = (),
    prices_file: Path | None = None,
    on_event: OnEvent | None = None,
    out: Path | None = None,
    peer_timeout_s: float = 20.0,
    plan: StoredPlan | None = None,
    profile: Profile | None = None,
    cloud: Settings | Sequence[Settings] | None = None,
    check: bool = True,
    quiet_interrupt: bool = False,
    loggers: Sequence[LoggerChoice] | None = None,
    labels: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] | None = None,
    **options: object,
) -> Result:
    """Trains a job on functions and waits for the end of the run. Works in notebooks, too, where an event loop is running.

    Args:
        job: a job; the path of a job file, or of a script; a `Task` (class or instance), or its name `module:Class`.
        configuration: options of the run, from `configure`. None: the job's own `[run]` table, `options` and defaults.
        faults: faults to inject.
        prices_file: price file instead of the built-in prices.
        on_event: called with every event of the run. None: the cell of a notebook shows the progress;
            elsewhere lines on standard error do. `lambda event: None` shows nothing.
        out: folder into which result, weights and report are copied.
        peer_timeout_s: seconds of silence after which a peer is suspected, at least; slow iterations make it longer.
        plan: the plan of the configuration. It is stored with the run and compared with it in the report.
        profile: the profile of the plan. It is stored with the run, so that the run's measurements can refine it.
        cloud: location of the function on a cloud, such as `AwsSettings` for platform `aws`; for regions, of each of their clouds.
            None: the platform's defaults.
        check: raise an error if the run fails; False: return its result.
        quiet_interrupt: return the result of a run that an interrupt has stopped, instead of raising `KeyboardInterrupt` when it has
            stopped at a checkpoint.
        loggers: names of loggers, `LoggerSpec`s with their options, or `Logger` objects; None: those of the job.
        labels: names and values by which the run is found, such as `{"team": "vision"}`; see `runs.labels`.
        on_progress: told what is checked before the start. None: shown as events are.
        options: fields of `Job` and `Configuration` that override the job's, such as `epochs=3, clip_norm=1.0, workers=4`.

    Returns:
        The result of a run that has finished, or was stopped at a checkpoint by its budget or another client.

    Raises:
        UserError: the job or an option is refused. Nothing was started or paid for.
        RunFailed: the run failed. Its `result` has the summary and the folder of the run.
        KeyboardInterrupt: an interrupt has stopped the run at a checkpoint, from which `resume` goes on.
    """
    if on_progress is None:
        on_progress = (lambda text: None) if on_event is not None or notebook.in_notebook() else progress.say
    request = launch_request(
        job,
        configuration,
        faults=faults,
        prices_file=prices_file,
        peer_timeout_s=peer_timeout_s,
        plan=plan,
        profile=profile,
        cloud=cloud,
        loggers=loggers,
        labels=labels,
        on_progress=on_progress,
        **options,
    )
    with blocking.handled_interrupts() as interrupts:
        result = _trained(request, on_event, out)
    return result.returned(check=check, interrupted=interrupts.happened and not quiet_interrupt)


def _trained(request: LaunchRequest, on_event: OnEvent | None, out: Path | None) -> Result:
    if request.configuration.regions.given:
        result: Result = load_kind("regions").launch(request, on_event=on_event, out=out)
        return result
    ready = prepared_run(request)
    prepared = ready.prepared
    shown = progress.shown_progress(prepared.spec.prices) if on_event is None else on_event
    with blocking.terminable(), begun(ready, shown) as run:
        if ready.simulated:
            from ephemeron.functions import simulation

            ending, ledger = blocking.run(
                lambda _: lifecycle.simulate(prepared, run.folder, request.job.simulation, run.log.on_event), runner=simulation.run
            )
        else:
            ending, ledger = blocking.run(
                lambda interrupts: lifecycle.drive(
                    run.folder, run.record, prepared.spec, run.log.on_event, ready.secrets, interrupts, prepared=prepared
                )
            )
        return run.conclude(ending, ledger, out)


def launch(job: Job | Program, configuration: Configuration | None = None, *, profile: Profile | None = None, **arguments: Any) -> str:
    """Starts a run that functions drive (`--detach`), and returns its name when the first of them does. This process can end then.

    `attach` shows the run and waits for its end, from this process or another one, and drives it where no function does any more.

    Args:
        job, configuration, profile: as for `train`.
        arguments: the other arguments of `train` but `on_event`, `out` and `check`.

    Raises:
        UserError: the job or an option is refused. Nothing was started or paid for.
        PlatformError: no function drives the run, which goes on; `attach` does.
    """
    request = launch_request(job, configuration, profile=profile, **{"on_progress": progress.say, **arguments})
    if request.configuration.regions.given:
        return str(load_kind("regions").launch_detached(request))
    ready = prepared_run(request)
    spec = ready.prepared.spec
    with blocking.terminable(), begun(ready, lambda event: None) as run:
        detached.check(run.record)
        session = detached.session_of(run.folder)
        if ready.simulated:
            simulations.store_simulation(run.folder, [ready.prepared])
        elif spec.sparse is None:  # else its driver starts it
            blocking.run(lambda _: lifecycle.launch(run.folder, run.record, spec, ready.secrets, ready.prepared, session=session))
        record = open_header(run.folder)
    blocking.run(lambda _: detached.hand_over(run.folder, record, ready.secrets))
    return run.folder.run_id


def launch_request(
    job: Job | Program,
    configuration: Configuration | None = None,
    *,
    faults: Sequence[Fault] = (),
    prices_file: Path | None = None,
    peer_timeout_s: float = 20.0,
    plan: StoredPlan | None = None,
    profile: Profile | None = None,
    cloud: Settings | Sequence[Settings] | None = None,
    loggers: Sequence[LoggerChoice] | None = None,
    labels: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    **options: object,
) -> LaunchRequest:
    """The arguments of `train`, with job and configuration as they hold.

    Raises:
        UserError: the job or an option is refused.
    """
    job = job_of(job, options)
    if configuration is not None and (named := options.keys() & {f.name for f in dataclasses.fields(Configuration)}):
        raise JobError(f"{min(named)} is given beside a configuration", remedy="give it to configure(…) instead")
    return LaunchRequest(
        job=job,
        configuration=configure(job) if configuration is None else _checked_configuration(configuration),
        faults=faults,
        prices_file=prices_file,
        peer_timeout_s=peer_timeout_s,
        plan=plan,
        profile=profile,
        cloud=cloud,
        loggers=loggers,
        labels=check_labels(labels),
        on_progress=on_progress,
    )


def dry_run(
    job: Job | Program,
    configuration: Configuration | None = None,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    **arguments: Any,
) -> Prediction:
    """Checks a run as `train` would, and predicts its time, cost and memory, before a function is started.

    A program of PyTorch does two steps in a process with a function's memory, repeats them, and restores them from a saved state; so does
    that of each region. A sparse job is measured on this machine, if it was not before.

    Args:
        job, configuration: as for `train`.
        on_progress: told what is measured.
        arguments: further arguments and options of `train`.

    Raises:
        UserError: what `train` would refuse, or the steps fail, differ when they are repeated, or cannot be restored.
    """
    request = launch_request(job, configuration, on_progress=on_progress, **arguments)
    found: Prediction = load_kind(_kind_of(request)).predict(request, on_progress)
    return found


def _kind_of(request: LaunchRequest) -> str:
    if request.configuration.regions.given:
        return "regions"
    return "training" if request.job.sparse is None else "sparse"


def resize(
    run_id: str,
    *,
    workers: int | None = None,
    memory_mb: int | None = None,
    aggregators: int | None = None,
    batch_size: int | None = None,
    nonaggregator_batch_size: int | None = None,
) -> Generation | None:
    """Changes the functions of a running run. They agree on an iteration from which on the new ones train.

    With global sampling that is one of the next iterations, else the first one of an epoch, so that every sample is still used
    once per epoch.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        workers: number of functions.
        memory_mb: quota of each function, MB.
        aggregators: K.
        batch_size, nonaggregator_batch_size: samples per iteration of an aggregator, and of each other function.

    Returns:
        The generation that begins, with `from_iteration`; None: the functions have not answered within half a minute.

    Raises:
        RunNotFound: there is no such run.
        UserError: it is not running, nothing would change, or its functions cannot change so.
    """
    wanted = Resize(
        workers=workers,
        memory_mb=memory_mb,
        aggregators=aggregators,
        batch_size=batch_size,
        nonaggregator_batch_size=nonaggregator_batch_size,
    )
    if not wanted.changes:
        raise JobError("nothing is to change", remedy="give workers, memory_mb, aggregators or batch_size")
    folder, run, spec = open_run(run_id)
    _refuse_groups(run, "resized")
    return blocking.run(lambda _: lifecycle.resize(folder, run, spec, wanted))


def _refuse_groups(run: RunHeader, what: str) -> None:
    if run.kind == "regions":
        raise UserError(f"run {run.run_id} has several regions and cannot be {what}; stop and resume work on it")
