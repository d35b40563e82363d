"""Groups that cannot be started when a run begins: the others train without them, and they join as soon as they can be started.

This is for failures of the platform or the store before any function of the group has connected to the others. What fails later, the run's
driver and supervisor deal with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.retry import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelError, EphemeronError, PlatformError, ServiceUnreachable
from ephemeron.regions.communicator.members import note_absent
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.stop_requests import RunStop
from ephemeron.training.driver.launching.launch import PreparedRun
from ephemeron.training.driver.run_driver import RunOutcome

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
