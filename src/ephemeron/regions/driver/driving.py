"""Runs of several groups of functions: one folder, one event stream, one bill and one driver, which drives each group as a run.

The folder of a group is `RUN/groups/RUN-NAME`. A group that fails or stops has all others stopped at a checkpoint. Functions need no
client: groups meet in the common store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ephemeron import blocking
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.config.typed import plain
from ephemeron.errors import ChannelError, JobError, UserError
from ephemeron.events import GroupStarted, Note, RegionLeft, RunEnded, RunStarted
from ephemeron.functions.simulated import SimulatedPool
from ephemeron.regions.driver.added_regions import AbsentGroup, AddedGroups, LateStart, admitted_anew, excuse_group, refused
from ephemeron.regions.driver.launch import PreparedGroups, prepared_groups
from ephemeron.regions.driver.network_options import variables_of
from ephemeron.regions.driver.region_events import GroupEvents, members_of, regions_of
from ephemeron.regions.driver.replanning import GroupReplanner
from ephemeron.runs import detached
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RUN_FILE, RunFolder, events_of
from ephemeron.runs.header import RunHeader, read_header, write_header
from ephemeron.runs.kinds import Following
from ephemeron.runs.lock import driving as driving_lock
from ephemeron.runs.status import may_be_running, session_end, status_of
from ephemeron.runs.stop_requests import RunStop, obeying, request_stop, withdraw_stop
from ephemeron.training.driver import lifecycle, progress, records, run_logging, simulations
from ephemeron.training.driver.launching.launch import LaunchRequest, PreparedRun, begun, new_run
from ephemeron.training.driver.lifecycle import OnEvent, StopRequests
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.result import Result, conclude
from ephemeron.training.driver.run_driver import RunOutcome, describe
from ephemeron.training.driver.run_logging import RunLogging
from ephemeron.training.driver.trained import store_program
from ephemeron.training.worker.spec import RunSpec

Ended: TypeAlias = tuple[RunOutcome, CostMeter]
Drive: TypeAlias = Callable[[RunStop], Awaitable[Ended]]

_CLEAR_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A group that is driven."""

    name: str
    drive: Drive
    late: LateStart | None = None
    """None: it cannot be started later."""
    has_left: Callable[[], bool] = lambda: False
    """Whether it has left the run while the others train on."""
    conclude: Callable[[RunOutcome, CostMeter], Result]


@dataclass(slots=True, kw_only=True)
class _Launch:
    """Groups that are launched."""

    ready: PreparedGroups
    folder: RunFolder
    events: GroupEvents
    stack: contextlib.ExitStack
    """Of the folders and logs of the groups."""
    wall_time: float
    replanner: GroupReplanner
    pool: SimulatedPool
    shared: Channel
    """Store of simulated groups."""


def train_groups(request: LaunchRequest, *, on_event: OnEvent | None, out: Path | None) -> Result:
    """Trains a job on several groups of functions, and waits for the end of the run."""
    chosen = run_logging.chosen(request.job.loggers if request.loggers is None else request.loggers)
    ready = prepared_groups(request)
    shown = progress.shown_progress(ready.spec.prices) if on_event is None else on_event
    with blocking.terminable(), new_run(ready.run_id) as folder:
        folder.create_key()
        write_header(folder, _header(ready, folder))
        if ready.members[0].prepared.code is not None:
            store_program(folder, request.job, ready.members[0].prepared.code)
        with run_logging.logged(folder, ready.spec, chosen, shown) as log:
            return _trained(folder, ready, log, log.on_event, out)


def simulate_again(folder: RunFolder, run: RunHeader, following: Following) -> Result:
    """Simulates a run that functions drive from its beginning; the caller has its lock."""
    parts = simulations.prepare_again(folder)
    spec, chosen, stop = run_spec(run), run_logging.continued(folder, following.loggers), RunStop()
    requests = [LaunchRequest(job=part.job, configuration=part.spec.configuration, labels=run.labels) for part in parts]
    members = tuple(
        PreparedRun(request=request, prepared=part, loggers=(), cloud=None, secrets={})
        for request, part in zip(requests, parts, strict=True)
    )
    again = tuple(partial(_same, member) for member in members)
    ready = PreparedGroups(run_id=folder.run_id, request=requests[0], members=members, spec=spec, store="", again=again)
    with run_logging.logged(folder, spec, chosen, following.on_event) as log:
        result = _trained(folder, ready, log, obeying(stop, folder, log.on_event), None, stop=stop)
    if result.finished:
        simulations.forget_simulation(folder)
    return result


def _same(member: PreparedRun) -> PreparedRun:
    return member


def _trained(
    folder: RunFolder, ready: PreparedGroups, log: RunLogging, on_event: OnEvent, out: Path | None, *, stop: StopRequests | None = None
) -> Result:
    """Starts all groups, drives them to their ends, and writes their results.

    Args:
        folder, ready: of the run.
        log: of the run.
        on_event: called with its events.
        out: see `train_groups`.
        stop: stops a simulated run; None: signals of this process do.
    """
    from ephemeron.communication.channels.parameter_server import MemoryParameterServer

    with contextlib.ExitStack() as stack:
        described = ready.described()
        events = GroupEvents(folder, described, on_event, simulated=ready.simulated)
        wall_time = time.time()
        events.emit(_started(ready, wall_time))
        replanner = GroupReplanner(ready.spec.configuration.regions.replan_every_s, events.emit)
        launch = _Launch(
            ready=ready,
            folder=folder,
            events=events,
            stack=stack,
            wall_time=wall_time,
            replanner=replanner,
            pool=SimulatedPool(),
            shared=MemoryParameterServer(),
        )
        members = _launched(launch)
        added = None if ready.simulated else AddedGroups(folder, ready, described)
        least = ready.spec.configuration.regions.least_regions
        if ready.simulated:
            from ephemeron.functions import simulation

            outcomes = blocking.run(lambda interrupts: _drive(members, stop or interrupts, replanner, least=least), runner=simulation.run)
        else:
            outcomes = blocking.run(
                lambda interrupts: _drive(members, interrupts, replanner, least=least, arriving=partial(_arriving, launch, added))
            )
        return _concluded(folder, launch.ready.spec, ready.store, members, outcomes, events, log, out)


def launch_groups(request: LaunchRequest) -> str:
    """Starts all groups and has functions drive them; returns the name of the run when the first of these does.

    Raises:
        JobError: a group is not admitted now, or its functions cannot be driven by functions.
    """
    chosen = run_logging.chosen(request.job.loggers if request.loggers is None else request.loggers)
    ready = prepared_groups(request)
    for member, region in zip(ready.members, ready.spec.configuration.regions.region, strict=True):
        if member.refusal is not None:
            raise JobError(
                f"region {region.name} cannot be started now: {member.refusal}", remedy="leave --detach out: it is started later"
            )
    with blocking.terminable(), new_run(ready.run_id) as folder:
        folder.create_key()
        record = _header(ready, folder)
        detached.check(record)
        write_header(folder, record)
        if ready.members[0].prepared.code is not None:
            store_program(folder, request.job, ready.members[0].prepared.code)
        with run_logging.logged(folder, ready.spec, chosen, lambda event: None) as log, contextlib.ExitStack() as stack:
            if ready.simulated:
                simulations.store_simulation(folder, [member.prepared for member in ready.members])
            else:
                _started_alone(folder, ready, log, stack)
    blocking.run(lambda _: detached.hand_over(folder, record, {}))
    return folder.run_id


def _started_alone(folder: RunFolder, ready: PreparedGroups, log: RunLogging, stack: contextlib.ExitStack) -> None:
    """Starts the functions of all groups, which are driven later."""
    wall_time, session = time.time(), detached.session_of(folder)
    GroupEvents(folder, ready.described(), log.on_event, simulated=False).emit(_started(ready, wall_time))
    runs = [stack.enter_context(begun(member, lambda event: None, parent=folder)) for member in ready.members]

    async def launch() -> None:
        for member, run in zip(ready.members, runs, strict=True):
            spec = member.prepared.spec
            await lifecycle.launch(run.folder, run.record, spec, member.secrets, member.prepared, session=session, origin=wall_time)

    blocking.run(lambda _: launch())


def _header(ready: PreparedGroups, folder: RunFolder) -> RunHeader:
    record = records.new_header(ready.spec, folder, source=None, settings={}, labels=ready.request.labels, code=ready.request.job.code)
    platforms = dict.fromkeys(member.prepared.spec.configuration.platform for member in ready.members)
    return dataclasses.replace(record, kind="regions", platform="+".join(platforms), channel=ready.store)


def stop_groups(folder: RunFolder, *, now: bool) -> None:
    """Asks all groups to stop at a checkpoint, or cancels their functions.

    Raises:
        UserError: none is running.
    """
    if (header := read_header(folder)) is not None and header.platform == "simulated":
        return request_stop(folder, now=now)
    stopped = 0
    for member in members_of(folder):
        record = _record(member)
        with contextlib.suppress(UserError):
            blocking.run(lambda _, member=member, record=record: lifecycle.stop(member, record, now=now))  # type: ignore[misc]
            stopped += 1
    if not stopped:
        raise UserError(f"run {folder.run_id} is not running")


def _record(member: RunFolder) -> RunHeader:
    record = read_header(member)
    if record is None:
        raise JobError(f"{member.path} has no readable {RUN_FILE}")
    return record


def _started(ready: PreparedGroups, wall_time: float) -> RunStarted:
    spec, described = ready.spec, ready.described()
    c = spec.configuration
    return RunStarted(
        t=0.0,
        run_id=spec.run_id,
        job=spec.name or spec.program,
        workers=c.workers,
        aggregators=c.aggregators,
        memory_mb=max(g.memory_mb for g, m in zip(described, ready.members, strict=True) if m.refusal is None),
        iterations=max(group.iterations for group in described),
        epochs=spec.epochs,
        samples=spec.samples,
        configuration=describe(spec),
        platform="+".join(dict.fromkeys(group.platform for group in described)),
        wall_time=wall_time,
        groups=described,
        notes=[_note(ready)],
    )


def _note(ready: PreparedGroups) -> str:
    rounds = {member.prepared.spec.iterations for member in ready.members}
    c, membership = ready.spec.configuration, ready.members[0].prepared.spec.group
    assert membership is not None
    packed = "" if c.regions.compression == "none" else f" in {c.regions.compression}"
    text = f"{len(ready.members)} regions exchange by {c.regions.sync}{packed} every {membership.every} iterations, and at the end"
    if len(rounds) == 1:
        return text
    return f"{text}; their numbers of iterations differ ({min(rounds)} to {max(rounds)}), so they do it {membership.rounds + 1} times"


async def _arriving(launch: _Launch, added: AddedGroups | None, take: Callable[[_Member], None]) -> None:
    """Starts groups that are asked for while the others train."""

    def start(ready: PreparedGroups, started: GroupStarted) -> None:
        launch.events.add(started, time.time() - launch.wall_time)
        launch.ready = ready
        take(_member(launch, len(ready.members) - 1))

    if added is not None:
        await added.run(start)


def _launched(launch: _Launch) -> list[_Member]:
    return [_member(launch, number) for number in range(len(launch.ready.members))]


def _member(launch: _Launch, number: int) -> _Member:
    """One of the groups, with its folder."""
    ready, folder, events, wall_time = launch.ready, launch.folder, launch.events, launch.wall_time
    replanner, stack, pool, shared = launch.replanner, launch.stack, launch.pool, launch.shared
    member, name = ready.members[number], ready.spec.configuration.regions.region[number]
    prepared = member.prepared
    told = replanner.watched(name.name, prepared.spec, events.relay(number), most=name.most_workers)
    run = stack.enter_context(begun(member, told, parent=folder))
    driven = replanner.driven(name.name)

    def simulated(stop: RunStop, run=run, prepared=prepared, driven=driven) -> Awaitable[Ended]:  # type: ignore[no-untyped-def]
        return lifecycle.simulate(
            prepared, run.folder, prepared.job.simulation, run.log.on_event, stop=stop, pool=pool, shared=shared, on_driver=driven
        )

    def live(  # type: ignore[no-untyped-def]
        stop: RunStop, run=run, prepared=prepared, secrets=member.secrets, anew=False, driven=driven
    ) -> Awaitable[Ended]:
        return lifecycle.drive(
            run.folder,
            run.record,
            prepared.spec,
            run.log.on_event,
            secrets,
            stop,
            prepared=prepared,
            origin=wall_time,
            anew=anew,
            on_driver=driven,
        )

    async def anew(  # type: ignore[no-untyped-def]
        stop: RunStop, run=run, again=ready.again[number], driven=driven
    ) -> Ended:
        found = await admitted_anew(again)
        assert found.prepared.spec.group is not None
        joining = found.in_group(dataclasses.replace(found.prepared.spec.group, joins=True))
        spec, settings = joining.prepared.spec, plain(joining.cloud) if joining.cloud else {}
        record = records.new_header(
            spec, run.folder, source=joining.prepared.source, settings=settings, parent=launch.folder.run_id, labels=found.request.labels
        )
        write_header(run.folder, record)
        return await lifecycle.drive(
            run.folder,
            record,
            spec,
            run.log.on_event,
            found.secrets,
            stop,
            prepared=joining.prepared,
            origin=wall_time,
            anew=True,
            on_driver=driven,
        )

    drive: Any = simulated if ready.simulated else live
    spec = prepared.spec.group
    assert spec is not None
    joining = member.in_group(dataclasses.replace(spec, joins=True)).prepared
    later: Any = partial(simulated, prepared=joining) if ready.simulated else partial(live, prepared=joining, anew=True)
    if member.refusal is not None:
        drive, later = partial(refused, why=member.refusal), anew
    late = LateStart(
        drive=later,
        excuse=partial(
            excuse_group, shared if ready.simulated else ready.store, run=ready.run_id, group=name.name, signing=folder.signing_key()
        ),
        tell=partial(_tell, events, name.name, wall_time, simulated=ready.simulated),
    )
    return _Member(name=name.name, drive=drive, late=late, conclude=run.conclude, has_left=partial(_has_left, run.folder))


def _tell(events: GroupEvents, name: str, wall_time: float, text: str, *, simulated: bool) -> None:
    t = asyncio.get_running_loop().time() if simulated else time.time() - wall_time
    events.emit(Note(t=t, level="warning", text=f"region {name} {text}"))


def _has_left(folder: RunFolder) -> bool:
    return folder.events.exists() and any(isinstance(event, RegionLeft) for event in events_of(folder))


def follow_groups(folder: RunFolder, run: RunHeader, following: Following, *, attach: bool) -> Result:
    """Supervises a run whose functions are running, or else continues the groups that have not finished. The caller has its lock."""
    known = records.read_result(folder)
    if attach and known is not None and known.status == session_end(folder.events) and not _may_be_training(folder):
        return Result(known, folder, known.causes)
    if run.platform == "simulated":
        if not attach:
            withdraw_stop(folder)
        return simulate_again(folder, run, following)
    spec, chosen = run_spec(run), run_logging.continued(folder, following.loggers)
    keep_code = attach or following.keep_code
    with run_logging.logged(folder, spec, chosen, following.on_event) as log, contextlib.ExitStack() as stack:
        groups = regions_of(folder)
        events = GroupEvents(folder, groups, log.on_event, simulated=False)
        if not attach:
            first = next(e for e in events_of(folder) if isinstance(e, RunStarted))
            latest = max(e.t for e in events_of(folder))
            events.emit(dataclasses.replace(first, t=latest, wall_time=time.time(), notes=[]))
        members = []
        replanner = GroupReplanner(spec.configuration.regions.replan_every_s, events.emit)
        most = {g.name: g.most_workers for g in spec.configuration.regions.region}
        secrets = {g.name: variables_of(g.credentials, f"region {g.name}") for g in spec.configuration.regions.region}
        for number, (group, place) in enumerate(zip(groups, members_of(folder), strict=True)):
            record = _record(place)
            known = records.read_result(place)
            over = known is not None and known.status == "finished"
            stack.enter_context(driving_lock(place))
            members.append(
                _Member(
                    name=group.name,
                    drive=_continuing(
                        place,
                        record,
                        replanner.watched(group.name, run_spec(record), events.relay(number), most=most.get(group.name, 0)),
                        replanner.driven(group.name),
                        secrets.get(group.name, {}),
                        attach=attach or over,
                        keep_code=keep_code,
                    ),
                    conclude=lambda ending, meter, place=place, record=record: conclude(  # type: ignore[misc]
                        place, run_spec(record), meter, ending, None
                    ),
                )
            )
        outcomes = blocking.run(lambda interrupts: _drive(members, interrupts, replanner))
        return _concluded(folder, spec, run.channel, members, outcomes, events, log, None)


def _may_be_training(folder: RunFolder) -> bool:
    return any(may_be_running(status_of(member)) for member in members_of(folder))


def _continuing(
    place: RunFolder,
    record: RunHeader,
    on_event: OnEvent,
    on_driver: lifecycle.OnDriver,
    secrets: dict[str, str],
    *,
    attach: bool,
    keep_code: bool,
) -> Drive:
    async def drive(stop: RunStop) -> Ended:
        spec = run_spec(record)
        try:
            return await lifecycle.drive(
                place, record, spec, on_event, secrets, stop, attach=attach, keep_code=keep_code, on_driver=on_driver
            )
        except UserError as e:
            if not attach:
                raise
            _log.info("%s", e)
            meter = CostMeter(spec.prices, servers=spec.servers)
            for event in events_of(place):
                meter.feed(event)
            return RunOutcome("stopped", []), meter

    return drive


async def _drive(
    members: list[_Member],
    interrupts: StopRequests,
    replanner: GroupReplanner,
    *,
    least: int = 1,
    arriving: Callable[[Callable[[_Member], None]], Awaitable[None]] | None = None,
) -> list[Ended | None]:
    """Drives all groups to their ends; None: it was never started. Where one fails or stops, the others are stopped at a checkpoint."""
    stops = [RunStop() for _ in members]
    groups = [AbsentGroup(member.name, member.drive, member.late) for member in members]
    for group in groups:
        group.permitted = lambda: sum(not each.absent for each in groups) - 1 >= least
    tasks = [asyncio.ensure_future(group.driven(stop)) for group, stop in zip(groups, stops, strict=True)]

    def stop_all(reason: str = "") -> None:
        for stop in stops:
            stop.request(reason)
        end_absent()

    def end_absent() -> None:
        for group, task in zip(groups, tasks, strict=True):
            if group.absent:
                task.cancel()

    changed = asyncio.Event()

    def take(member: _Member) -> None:
        stop, group = RunStop(), AbsentGroup(member.name, member.drive, member.late)
        members.append(member)
        stops.append(stop)
        groups.append(group)
        tasks.append(asyncio.ensure_future(group.driven(stop)))
        changed.set()

    background = [asyncio.ensure_future(replanner.run())]
    if arriving is not None:
        background.append(asyncio.ensure_future(arriving(take)))
    with interrupts.handled(stop_all):
        handled: set[int] = set()
        while len(handled) < len(tasks):
            changed.clear()
            more: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
            running = [task for number, task in enumerate(tasks) if number not in handled]
            await asyncio.wait([more, *running], return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            for number, (member, task) in enumerate(zip(members, tasks, strict=True)):
                if number in handled or not task.done():
                    continue
                handled.add(number)
                if task.cancelled():
                    continue
                if task.exception() is not None:
                    stop_all(f"region {member.name} failed")
                elif (status := task.result()[0].status) != "finished" and not (status == "stopped" and member.has_left()):
                    stop_all(f"region {member.name} has {'stopped' if status == 'stopped' else 'failed'}")
            if all(group.absent for group, task in zip(groups, tasks, strict=True) if not task.done()):
                end_absent()
    for each in background:
        each.cancel()
    for failed in await asyncio.gather(*background, return_exceptions=True):
        if isinstance(failed, Exception):
            _log.error("what was done for the regions beside their driving ended early", exc_info=failed)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if errors:
        raise errors[0]
    if all(task.cancelled() for task in tasks):
        raise next(group.failure for group in groups if group.failure is not None)
    return [None if task.cancelled() else task.result() for task in tasks]


def _concluded(
    folder: RunFolder,
    spec: RunSpec,
    store: str,
    members: Sequence[_Member],
    outcomes: Sequence[Ended | None],
    events: GroupEvents,
    log: RunLogging,
    out: Path | None,
) -> Result:
    """Writes the results of the groups, and that of the run: the weights are those of the first group, as all are alike."""
    causes: list[str] = []
    stayed: list[Ended] = []
    for member, ended in zip(members, outcomes, strict=True):
        if ended is None:
            continue
        member.conclude(*ended)
        causes += [f"region {member.name}: {cause}" for cause in ended[0].causes]
        if not (ended[0].status == "stopped" and member.has_left()):
            stayed.append(ended)
    statuses = {ending.status for ending, _ in stayed}
    first = stayed[0][0]
    ending = RunOutcome("failed" if "failed" in statuses else "stopped" if "stopped" in statuses else "finished", causes)
    if ending.status == "finished":
        ending = dataclasses.replace(first, causes=causes)
        hashes = {each.final.weights_sha256 for each, _ in stayed if each.final is not None}
        if len(hashes) > 1:
            events.emit(Note(t=0.0, level="info", text="buffers of the regions differ; the weights are those of the first region"))
        if store:
            blocking.run(lambda _: _clear(store, folder.run_id))
    t = max(ended[1].ended_at for ended in outcomes if ended is not None)
    events.emit(RunEnded(t=t, status=ending.status, causes=causes))
    meter = CostMeter(spec.prices, servers=spec.servers)
    for event in events_of(folder):
        meter.feed(event)
    return log.conclude(conclude(folder, spec, meter, ending, out))


async def _clear(store: str, run: str) -> None:
    """Deletes what the groups have left in their common store."""
    with contextlib.suppress(ChannelError, TimeoutError):
        async with asyncio.timeout(_CLEAR_S), open_channel(store) as channel:
            await channel.delete(await channel.list(f"{run}/groups/"))
