"""Groups that are added to a run while it trains.

Another process asks for one in the folder of the run; the client that drives the run has the job, prepares the group and starts it. It
joins as a group does that could not be started at the beginning.

RUN/joins/NAME.json          the group that is asked for
RUN/joins/NAME.answer.json   `error`: why it is refused; "": it is started

Groups that cannot be started when a run begins: the others train without them, and they join as soon as they can be started.

This is for failures of the platform or the store before any function of the group has connected to the others. What fails later, the run's
driver and supervisor deal with.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.retrying import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelError, EphemeronError, JobError, PlatformError, ServiceUnreachable
from ephemeron.events import GroupStarted
from ephemeron.regions.communicator.members import note_absent
from ephemeron.regions.driver.launch import (
    PreparedGroups,
    cloud_of_group,
    described_group,
    divide,
    group_sync,
    in_group,
    job_of,
    member_values,
    prepared_member,
    refuse_unfit,
)
from ephemeron.regions.driver.network_options import network_of
from ephemeron.regions.policies import checked_sync
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header, write_header
from ephemeron.runs.stop_requests import RunStop
from ephemeron.training.driver.api import configured
from ephemeron.training.driver.launching.launch import PreparedRun
from ephemeron.training.driver.launching.training_data import training_data
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.job import RunRegion
from ephemeron.training.worker.spec import GroupMembership

JOINS = "joins"
LOOK_S = 1.0
"""Interval at which the client looks whether a group is asked for."""


def ask(folder: RunFolder, group: RunRegion) -> None:
    """Asks for a group; an earlier answer about it is deleted."""
    (folder.path / JOINS).mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder.path / JOINS / f"{group.name}.answer.json").unlink()
    folder.write(f"{JOINS}/{group.name}.json", plain(group))


def answer_about(folder: RunFolder, name: str) -> str | None:
    """What the client has answered: why it refuses a group, or "": it has started it; None: nothing yet."""
    found = folder.read(f"{JOINS}/{name}.answer.json")
    return None if found is None else str(found.get("error", ""))


def _asked(folder: RunFolder) -> list[RunRegion]:
    """Groups that are asked for, and not answered."""
    if not (folder.path / JOINS).is_dir():
        return []
    names = {path.name.removesuffix(".json") for path in (folder.path / JOINS).glob("*.json")}
    waiting = sorted(name for name in names if not name.endswith(".answer") and f"{name}.answer" not in names)
    return [build(RunRegion, folder.read(f"{JOINS}/{name}.json") or {}, where=f"{JOINS}/{name}.json") for name in waiting]


class AddedGroups:
    """The client's part.

    Args:
        folder: of the run.
        ready: its groups.
        described: the same, as the events have them.
    """

    def __init__(self, folder: RunFolder, ready: PreparedGroups, described: list[GroupStarted]) -> None:
        self._folder, self.ready, self._described = folder, ready, described

    async def run(self, start: Callable[[PreparedGroups, GroupStarted], None]) -> None:
        """Has groups started that are asked for, until it is cancelled.

        Args:
            start: starts the last one of the groups.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for group in _asked(self._folder):
                error = ""
                try:
                    ready = await asyncio.to_thread(with_group, self.ready, group)
                    started = self._described_next(ready)
                    self._record(ready)
                    start(ready, started)
                    self.ready = ready
                    self._described.append(started)
                except (EphemeronError, OSError) as e:
                    error = str(e)
                self._folder.write(f"{JOINS}/{group.name}.answer.json", {"error": error})

    def _described_next(self, ready: PreparedGroups) -> GroupStarted:
        first = max(max(g.first_rank + g.workers, g.more_ranks + max(0, g.most_workers - g.workers)) for g in self._described)
        found = described_group(ready.spec.configuration.regions.region[-1], ready.members[-1], first)
        return dataclasses.replace(found, more_ranks=first + found.workers)

    def _record(self, ready: PreparedGroups) -> None:
        """Adds the last group to the record of the run, for clients that attach later."""
        record = read_header(self._folder)
        assert record is not None
        spec = json.loads(ready.spec.to_bytes())
        write_header(
            self._folder, dataclasses.replace(record, payload={**record.payload, "spec": spec}, functions=ready.spec.configuration.workers)
        )


def with_group(ready: PreparedGroups, group: RunRegion) -> PreparedGroups:
    """The groups of a run and one more, which joins them.

    Args:
        ready: groups of the run.
        group: the one that joins. Without samples of its own it has a random part of the job's, as large as its share of all, which other
            groups have, too.

    Raises:
        UserError, PlatformError: it is refused. Nothing has been started.
    """
    job, before = ready.request.job, ready.request.configuration
    c = dataclasses.replace(before, regions=dataclasses.replace(before.regions, region=(*before.regions.region, group)))
    refuse_unfit(job, c)
    own = configured(member_values(c, group))
    if (own.platform == "simulated") != ready.simulated:
        raise JobError(f"region {group.name}: simulated regions and real ones cannot train together")
    part = None
    if group.data is None:
        share = min(1.0, group.share or 1.0)
        seed = job.seed + zlib.crc32(group.name.encode())
        part = divide(training_data(job).samples, [share, 1.0 - share], seed=seed)[0]
        if not part:
            raise JobError(f"region {group.name} has no training samples", remedy="give it a larger share")
    request = dataclasses.replace(ready.request, configuration=c, faults=())
    workers = ready.spec.configuration.workers + own.workers
    again = partial(
        prepared_member,
        dataclasses.replace(
            request,
            job=job_of(job, group, own.workers / workers),
            configuration=own,
            loggers=(),
            prices_file=group.prices or request.prices_file,
            cloud=cloud_of_group(request, own),
        ),
        group,
        run_id=f"{ready.run_id}-{group.name}",
        part=part,
    )
    found = again()
    membership = _membership(ready, group, found)
    member = found.in_group(membership)
    spec = dataclasses.replace(
        ready.spec,
        samples=ready.spec.samples + found.prepared.spec.samples,
        configuration=dataclasses.replace(ready.spec.configuration, workers=workers, regions=c.regions),
    )
    return dataclasses.replace(
        ready, request=request, members=(*ready.members, member), spec=spec, again=(*ready.again, partial(in_group, again, membership))
    )


def _membership(ready: PreparedGroups, group: RunRegion, found: PreparedRun) -> GroupMembership:
    """The group in the run: it exchanges as often as the others do."""
    first, c, iterations = (ready.members[0].prepared.spec.group, ready.request.configuration, found.prepared.spec.iterations)
    assert first is not None
    every = first.every
    if not group_sync(c).auto:
        if first.rounds and iterations <= first.rounds:
            raise JobError(
                f"region {group.name} has {iterations} iterations, and the regions exchange {first.rounds} times",
                remedy="give it more samples, or smaller batches",
            )
        wanted = group.exchange_every or max(1, round(c.regions.exchange_every * iterations / min(first.iterations)))
        every = min(group_sync(c).every(wanted), (iterations - 1) // first.rounds if first.rounds else iterations)
        checked_sync(c.regions.sync, c.regions.compression, every)
    return dataclasses.replace(
        first,
        index=len(ready.members),
        names=(*_names(ready), group.name),
        every=every,
        joins=True,
        iterations=(*(m.prepared.spec.iterations for m in ready.members), iterations),
        network=network_of(c, group),
    )


def _names(ready: PreparedGroups) -> tuple[str, ...]:
    return tuple(group.name for group in ready.spec.configuration.regions.region)


# -- groups that cannot be started when a run begins --------------------------------------------------------------


RETRY_S = (5.0, 60.0)
"""Pauses between two attempts to start a group: the first one, and the longest; each is twice the one before."""
NOT_STARTED = (PlatformError, ChannelError, ServiceUnreachable, OSError)

Drive = Callable[[RunStop], Awaitable[tuple[RunOutcome, CostMeter]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStart:
    """How a group is started later than the others.

    Args:
        drive: starts its functions, which join the others, and drives them.
        excuse: says that the others need not wait for it; returns whether that is so.
        tell: tells the user.
    """

    drive: Drive
    excuse: Callable[[], Awaitable[bool]]
    tell: Callable[[str], None]


async def refused(stop: RunStop, *, why: Exception) -> tuple[RunOutcome, CostMeter]:
    """The start of a group that its platform has not admitted.

    Raises:
        PlatformError: always.
    """
    raise PlatformError(str(why))


async def admitted_anew(again: Callable[[], PreparedRun]) -> PreparedRun:
    """A group as its platform admits it now.

    Raises:
        PlatformError: it does not.
    """
    try:
        return await asyncio.to_thread(again)
    except (EphemeronError, OSError) as e:
        raise PlatformError(str(e)) from e


class AbsentGroup:
    """One group from its first start to its end.

    Args:
        name: of the group.
        drive: starts it with the others.
        late: starts it later; None: a run in which it cannot be started fails.
    """

    def __init__(self, name: str, drive: Drive, late: LateStart | None) -> None:
        self._name, self._drive, self._late = name, drive, late
        self.absent = False
        """Whether it has no functions now, and the others train without it."""
        self.permitted: Callable[[], bool] = lambda: True
        """Whether the others may train without it."""
        self.failure: Exception | None = None
        """Why it could not be started the latest time."""

    async def driven(self, stop: RunStop) -> tuple[RunOutcome, CostMeter]:
        """Drives the group to its end.

        Raises:
            EphemeronError: it cannot be started, and the others would wait for it.
        """
        try:
            return await self._drive(stop)
        except NOT_STARTED as e:
            if self._late is None or not self.permitted() or not await self._late.excuse():
                raise
            self.absent, self.failure, pause = True, e, RETRY_S[0]
            self._late.tell(f"cannot be started: {e}; the others train without it, and it is tried again")
        while True:
            await asyncio.sleep(pause)
            try:
                self.absent = False
                return await self._late.drive(stop)
            except NOT_STARTED as e:
                self.absent, self.failure, pause = True, e, min(2 * pause, RETRY_S[1])
                self._late.tell(f"cannot be started yet: {e}")


async def excuse_group(store: str | Channel, *, run: str, group: str, signing: SigningKey) -> bool:
    """Says in the store of all groups that one could not be started; returns whether the others will not wait for it.

    Args:
        store: its address, or itself.
        run: of all groups.
        group: its name.
        signing: key of the run.
    """
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_channel(store)) if isinstance(store, str) else store
        channel = RunChannel(opened, owner=f"absent-{group}", retry=BRIEF, signing=signing, signs=lambda key: True)
        excused: bool = await note_absent(channel, run, group)
        return excused
