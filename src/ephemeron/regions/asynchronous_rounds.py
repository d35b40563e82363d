"""How a region under an asynchronous policy takes in what has arrived of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ephemeron.regions.communicator.base import Update, UpdateExchange
from ephemeron.regions.incoming_updates import IncomingUpdates
from ephemeron.regions.policies import AdaptiveSchedule, Contribution, Due, ExchangeSchedule, weighted_mean
from ephemeron.regions.region_state import RegionState


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
