"""Launch of a new run in three steps, for the blocking and the asynchronous interface: `prepared_run`, `begun`, `BegunRun.conclude`.

The first refuses what cannot work and stores nothing. The second makes the folder of the run, which is deleted if the run does
not begin. Between the second and the third the run is driven (`lifecycle`).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.communication.channels import public_address
from ephemeron.communication.channels.address import check_channel
from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError, JobError, MissingExtra, PlatformError, ServiceUnreachable, UserError
from ephemeron.functions.base import Limits
from ephemeron.functions.deployed_packages import check_extra, check_modules
from ephemeron.functions.early_daemon import want_functions
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.registry import cloud as cloud_of
from ephemeron.prices import load_prices
from ephemeron.runs import folders, run_platform
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import PLAN_FILE, PROFILE_FILE, RunFolder
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.kinds import load_kind
from ephemeron.runs.lock import driving as driving_lock
from ephemeron.training.driver import records, run_logging
from ephemeron.training.driver.launching import admission
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.result import Result, conclude
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.driver.run_logging import LoggerChoice, RunLogging
from ephemeron.training.driver.trained import store_program
from ephemeron.training.job import Configuration, Fault, Job, Simulation
from ephemeron.training.job.sparse_job import refuse_for_sparse_jobs
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.planner.plan import StoredPlan
from ephemeron.training.worker.spec import GroupMembership

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Provider, Settings

LOCAL_COLD_START_S = 3.0
"""Seconds before its end at which a function on this machine starts its successor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What `train` is asked for; see its arguments."""

    job: Job
    configuration: Configuration
    faults: Sequence[Fault] = ()
    prices_file: Path | None = None
    peer_timeout_s: float = 20.0
    plan: StoredPlan | None = None
    profile: Profile | None = None
    cloud: Settings | Sequence[Settings] | None = None
    loggers: Sequence[LoggerChoice] | None = None
    run_id: str | None = None
    """Its name; None: a new one."""
    report: bool = True
    """Whether its report is written at its end."""
    parent: str = ""
    """Study of which it is a trial."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """See `runs.labels`."""
    on_progress: Callable[[str], None] = lambda text: None
    """Told what is checked before the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that was checked, and has no folder yet."""

    request: LaunchRequest
    prepared: Prepared
    loggers: Sequence[tuple[Any, run_logging.LoggerRecord]]
    cloud: Settings | None
    secrets: dict[str, str] = field(repr=False)
    """Variables of the channel."""
    refusal: EphemeronError | OSError | None = None
    """Why its platform does not admit it now; None: it does. Memory and timeout of its functions are then provisional."""

    @property
    def simulated(self) -> bool:
        return self.prepared.spec.configuration.platform == "simulated"

    def in_group(self, membership: GroupMembership) -> PreparedRun:
        """The same as a group of a larger run."""
        spec = dataclasses.replace(self.prepared.spec, group=membership)
        objects: dict[str, list[Buffer]] = {**self.prepared.objects, Keys(spec.run_id).spec: [spec.to_bytes()]}
        return dataclasses.replace(self, prepared=dataclasses.replace(self.prepared, spec=spec, objects=objects))

    def with_note(self, text: str) -> PreparedRun:
        """The same with a remark for the reader of the run's output."""
        notes = (*self.prepared.notes, text)
        return dataclasses.replace(self, prepared=dataclasses.replace(self.prepared, notes=notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRun:
    """A run with a folder, which this process drives."""

    ready: PreparedRun
    folder: RunFolder
    record: RunHeader
    log: RunLogging

    def conclude(self, ending: RunOutcome, meter: CostMeter, out: Path | None = None) -> Result:
        """Writes and logs the end of the run; `out` gets a copy."""
        report = self.ready.request.report
        return self.log.conclude(conclude(self.folder, self.ready.prepared.spec, meter, ending, out, report=report))


def platform_limits(name: str, world: Simulation | None = None) -> Limits:
    """Limits of a platform; those of the simulated one are from `world`."""
    if name == "simulated":
        from ephemeron.functions.simulated import simulated_limits

        return simulated_limits(world or Simulation())
    if name in CLOUDS:
        return cloud_of(name).limits
    from ephemeron.functions.local import default_limits

    return default_limits()


def prepared_run(
    request: LaunchRequest, *, run_id: str | None = None, part: Sequence[int] | None = None, may_wait: bool = False
) -> PreparedRun:
    """Checks a run and makes its objects. Nothing is stored or started.

    Args:
        request: the run.
        run_id: its name; None: that of the request, or a new one.
        part: positions of the training samples to train on; None: all.
        may_wait: a run that its cloud does not admit now is prepared all the same, to be started later.

    Raises:
        UserError: the run is refused.
    """
    job, world = request.job, request.job.simulation
    chosen = run_logging.chosen(job.loggers if request.loggers is None else request.loggers)
    refusal: EphemeronError | OSError | None = None
    try:
        c, cloud, secrets, limits, cold_start_s = admitted(job, request.configuration, request.cloud)
    except (UserError, PlatformError, ServiceUnreachable, OSError) as e:
        if not may_wait or not may_be_refused(request.configuration.platform) or isinstance(e, MissingExtra):
            raise
        refusal = e
        c, cloud, secrets, limits, cold_start_s = _provisional(request.configuration, request.cloud)
    name = run_id or request.run_id or folders.new_run_id(job.name)
    prices = load_prices(service_of(c.store), request.prices_file, platform=c.platform, servers=job.sparse is not None)
    if job.sparse is not None:
        refuse_for_sparse_jobs(job, c, faults=request.faults)
        check_extra("sparse", limits, c.platform, what="a sparse job")
        prepared = load_kind("sparse").prepare(job, c, run_id=name, limits=limits, prices=prices, peer_timeout_s=request.peer_timeout_s)
        return PreparedRun(request=request, prepared=prepared, loggers=chosen, cloud=cloud, secrets=secrets)
    _begin_functions(c, limits)
    prepared = prepare(
        job,
        c,
        run_id=name,
        limits=limits,
        part=part,
        prices=prices,
        faults=request.faults,
        peer_timeout_s=request.peer_timeout_s,
        cold_start_s=cold_start_s,
        on_progress=request.on_progress,
        network=(world.latency_s, world.bandwidth_mb_s) if c.platform == "simulated" else (0.0, None),
    )
    named = (job.program.target, job.loss.target, *(v for v in job.program.options.values() if isinstance(v, str)))
    check_modules([target.partition(":")[0] for target in named], limits, c.platform)
    _begin_functions(prepared.spec.configuration, limits)
    return PreparedRun(request=request, prepared=prepared, loggers=chosen, cloud=cloud, secrets=secrets, refusal=refusal)


def _begin_functions(c: Configuration, limits: Limits) -> None:
    """Has an early daemon begin the functions of a run on this machine."""
    if c.platform == "local":
        want_functions(memory_mb=c.memory_mb, count=c.workers, limits=limits)


@contextmanager
def begun(ready: PreparedRun, on_event: OnEvent, *, parent: RunFolder | None = None) -> Iterator[BegunRun]:
    """Makes the folder of a run and starts its loggers. Inside, this process drives the run.

    Args:
        ready: the run.
        on_event: called with every event of the run.
        parent: of the run of which this is a group: its folder holds this one, and its key is this one's. `lifecycle` alone then
            gives the variables of the channel, as other groups have their own.
    """
    prepared, request = ready.prepared, ready.request
    run_platform.sweep(folders.runs_folder())
    with new_run(prepared.spec.run_id, parent) as folder:
        if parent is None:
            folder.create_key(request.parent)
        else:
            shutil.copy2(parent.path / folders.KEY_FILE, folder.path / folders.KEY_FILE)
        variables = environment(ready.secrets) if parent is None else nullcontext()
        settings: Mapping[str, object] = plain(ready.cloud) if ready.cloud else {}
        record = records.new_header(
            prepared.spec,
            folder,
            source=prepared.source,
            settings=settings,
            parent=request.parent if parent is None else parent.run_id,
            labels=request.labels,
            code=request.job.code,
        )
        write_header(folder, record)
        if prepared.code is not None or request.job.sparse is not None:
            store_program(folder, request.job, prepared.code)
        if request.plan is not None:
            request.plan.save(folder.path / PLAN_FILE)
        if request.profile is not None:
            request.profile.save(folder.path / PROFILE_FILE)
        with variables, run_logging.logged(folder, prepared.spec, ready.loggers, on_event) as log:
            yield BegunRun(ready=ready, folder=folder, record=record, log=log)


@contextmanager
def new_run(run_id: str, parent: RunFolder | None = None) -> Iterator[RunFolder]:
    """Folder of a new run that this process drives. It is deleted if the run does not begin.

    Args:
        run_id: of the run.
        parent: of the run of which this is a group.
    """
    folder = folders.create(run_id, None if parent is None else parent.path / folders.GROUPS)
    try:
        with driving_lock(folder):
            yield folder
    except BaseException:
        if not folder.events.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _settings(where: Provider[Any], given: Settings | Sequence[Settings] | None) -> Settings:
    if given is None:
        given = where.settings()
    if not isinstance(given, where.settings):
        raise JobError(f"{type(given).__name__} is not for platform {where.name}", remedy=f"give {where.settings.__name__}")
    located: Settings = given.located()
    return located


def admitted(
    job: Job, c: Configuration, cloud: Settings | Sequence[Settings] | None
) -> tuple[Configuration, Settings | None, dict[str, str], Limits, float]:
    """Configuration as the platform admits it, the cloud's settings, secrets of the channel, limits, and seconds of a cold start."""
    check_channel(c.channel)
    public, secrets = public_address(c.channel)
    c = dataclasses.replace(c, channel=public)
    if c.platform in CLOUDS:
        where = cloud_of(c.platform)
        cloud = _settings(where, cloud)
        c, limits = admission.admit(where, c, cloud, secrets)
        return c, where.recorded(cloud, limits), secrets, limits, where.cold_start_s
    if cloud is not None:
        raise JobError(f"{type(cloud).__name__} is not for platform {c.platform}")
    cold_start_s = job.simulation.cold_start_s if c.platform == "simulated" else LOCAL_COLD_START_S
    return c, cloud, secrets, platform_limits(c.platform, job.simulation), cold_start_s


def may_be_refused(platform: str) -> bool:
    """Whether a platform may admit later what it refuses now."""
    return platform in CLOUDS


def _provisional(
    c: Configuration, cloud: Settings | Sequence[Settings] | None
) -> tuple[Configuration, Settings | None, dict[str, str], Limits, float]:
    """What `admitted` returns, of a cloud that does not admit the run now: with all that it may give a function."""
    public, secrets = public_address(c.channel)
    where = cloud_of(c.platform)
    settings, limits = _settings(where, cloud), where.limits
    c = dataclasses.replace(
        c, channel=public, memory_mb=c.memory_mb or limits.memory_max_mb, function_timeout_s=c.function_timeout_s or limits.lifetime_s
    )
    return c, where.recorded(settings, limits), secrets, limits, where.cold_start_s


def service_of(channel: str) -> str:
    """Kind of service at a channel's address, as price files name it."""
    if channel.startswith(("redis://", "rediss://")):
        return "cache"
    return "server" if channel.startswith(("ps://", "parameter_server")) else "objects"
