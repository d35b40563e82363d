"""What a region reads of the others: their parts of rounds, begun to be read when the region has sent its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from ephemeron.errors import ChannelTimeout
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.communicator.base import UpdateExchange
from ephemeron.regions.policies import AdaptiveSchedule, Contribution, Due, ExchangeSchedule, weighted_mean
from ephemeron.regions.region_state import RegionState
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.object_receiver import handle_timeout
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


# -- how a region under an asynchronous policy takes in what has arrived of the others ----------------------------


class AsynchronousRounds:
    """Rounds of the others, as one region applies them.

    Args:
        name: of the region.
        state: of the exchange.
        schedule: of the region.
        communicator: with the others.
        incoming: updates of the others.
    """

    def __init__(
        self,
        name: str,
        state: RegionState,
        schedule: ExchangeSchedule | AdaptiveSchedule,
        communicator: UpdateExchange,
        incoming: IncomingUpdates,
    ) -> None:
        self._name, self._state, self._schedule = name, state, schedule
        self._communicator, self._incoming = communicator, incoming

    async def take(self, vector: np.ndarray, least: int) -> None:
        """Applies to a vector what has arrived of other regions; waits for their rounds up to `least`."""
        state, whole = self._state, slice(0, vector.size)
        for number in range(1, least + 1):
            active = [name for name in state.members.active(number) if name != self._name]
            late = [name for name in active if state.applied[name].get(0, 0) < number]
            self._merge(vector, state.accepted(await self._incoming.get(late, Due(0, number)), whole))
        names = state.members.names
        arrived = [u for u in self._communicator.arrived(state.applied) if 0 < u.round <= self._schedule.rounds and u.region in names]
        ordered = sorted(arrived, key=lambda update: (names.index(update.region), update.round))
        self._merge(vector, state.accepted(_without_gaps(ordered, state.applied), whole))

    def agree(self, vector: np.ndarray, updates: Sequence[Update]) -> None:
        """Makes a vector the mean of the parameters of all regions: they still differ, as these were averages of averages."""
        accepted = self._state.accepted(updates, slice(0, vector.size), parameters=True)
        if accepted:
            vector[:] = weighted_mean([c._replace(samples=1) for _, c in accepted])

    def _merge(self, vector: np.ndarray, found: Sequence[tuple[str, Contribution]]) -> None:
        given = [c for _, c in found]
        if self._state.policy.averages:
            given = list(dict(found).values())  # the newest of each region
        vector[:] = self._state.policy.merge(slice(0, vector.size), vector, given, last=False)


def _without_gaps(updates: Sequence[Update], applied: dict[str, dict[int, int]]) -> list[Update]:
    """Those that follow what is applied round by round: what a region has sent later waits for the ones before."""
    reached = {name: rounds.get(0, 0) for name, rounds in applied.items()}
    found = []
    for update in updates:
        if update.round == reached[update.region] + 1:
            reached[update.region] += 1
            found.append(update)
    return found
