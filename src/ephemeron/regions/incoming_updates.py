"""What a region reads of the others: their parts of rounds, begun to be read when the region has sent its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ephemeron.errors import ChannelTimeout
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.policies import Due
from ephemeron.regions.region_state import RegionState
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.object_wait import handle_timeout
from ephemeron.training.worker.lifecycle import InvocationLifecycle

_ABSENT_EVERY_S = 1.0
"""Interval at which it is looked whether a region that was never heard could not be started."""


class IncomingUpdates:
    """Updates of other regions.

    Args:
        communicator: with them.
        lifecycle: of the invocation.
        state: gives that of the exchange.
        applied_before: iteration before which a round is applied, for errors.
    """

    def __init__(
        self,
        communicator: Communicator,
        lifecycle: InvocationLifecycle,
        state: Callable[[], RegionState],
        applied_before: Callable[[Due], int],
    ) -> None:
        self._communicator, self._lifecycle, self._state = communicator, lifecycle, state
        self._applied_before = applied_before
        self._reads: dict[tuple[str, Due], asyncio.Task[Update]] = {}

    async def get(self, names: Sequence[str], due: Due) -> list[Update]:
        """Parts of a round of some regions, in their order, once they are there; those of regions that could not be started are left out."""
        found = await all_of(self._get(name, due) for name in names)
        return [update for update in found if update is not None]

    def begin(self, region: str, due: Due) -> asyncio.Task[Update]:
        """Begins to read a region's part of a round, if it has not begun."""
        read = self._reads.get((region, due))
        if read is None:
            deadline = self._lifecycle.invocation.ctx.deadline
            read = asyncio.create_task(self._communicator.get(region, due.fragment, due.round, deadline=deadline))
            self._reads[region, due] = read
        return read

    def cancel(self) -> list[asyncio.Task[Update]]:
        """Ends all reads; returns what is to be awaited."""
        for read in self._reads.values():
            read.cancel()
        return list(self._reads.values())

    async def _get(self, region: str, due: Due) -> Update | None:
        """A region's part of a round; None: it could not be started when the run began."""
        read = self.begin(region, due)
        state = self._state()
        unheard = not state.applied[region] and state.members.first_round(region) == 1
        if unheard and await self._is_absent(region, read):
            del self._reads[region, due]
            return None
        while not read.done():  # its own functions and clients see to it that another region goes on
            await asyncio.wait({read}, timeout=self._lifecycle.wait_timeout_s())
            if not read.done():
                late = StalledPeers(self._applied_before(due), ())
                missing = ChannelTimeout(f"region {region} has not sent round {due.round}")
                await handle_timeout(self._lifecycle.on_timeout, late, missing)
        del self._reads[region, due]
        return read.result()

    async def _is_absent(self, region: str, read: asyncio.Task[Update]) -> bool:
        """Whether a region that was never heard could not be started when the run began. Waits for its first part, or its time."""
        latest = self._lifecycle.now() + self._lifecycle.wait_timeout_s()
        while not read.done() and self._lifecycle.now() < latest:
            await asyncio.wait({read}, timeout=_ABSENT_EVERY_S)
            if not read.done() and await self._communicator.table.is_absent(region):
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)
                self._state().members.is_absent(region)
                return True
        return False
