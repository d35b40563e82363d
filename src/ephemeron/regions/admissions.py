"""How the regions of a run take in one that joins: the coordinator's part (`entrance` has that of the region itself).

The coordinator announces a region that asks, and when all keep their updates for it, keeps a state of the run after each of its exchanges. A region that was
not heard for `ABSENT_S` while it asks is forgotten, so that what is kept for it stays bounded.
"""

from __future__ import annotations

import asyncio
import struct
from typing import NamedTuple

import numpy as np

from ephemeron.errors import CorruptMessage
from ephemeron.regions.communicator import Communicator
from ephemeron.regions.communicator.members import EntranceRequest
from ephemeron.regions.membership import LEAD, Entrance
from ephemeron.regions.policies import AdaptiveSchedule, ExchangeSchedule, RoundPlan
from ephemeron.regions.records import DecisionMeta, RegionKeys, decode_decision, encode_decision
from ephemeron.regions.region_state import RegionState
from ephemeron.training.worker.lifecycle import InvocationLifecycle

LOOK_S = 1.0
"""Shortest time between two looks whether a region asks to join, or this one is to leave."""
RENEW_S = 10.0
"""Interval at which a region that joins says that it still does."""
ABSENT_S = 120.0
"""Time after which one that does not say so is forgotten, by the coordinator's clock."""
_LENGTH = struct.Struct("<Q")


class Snapshot(NamedTuple):
    """State of a run for a region that joins."""

    vector: np.ndarray
    """Parameters of the region that has kept it, after one of its exchanges."""
    state: bytes
    """Its `RegionState`."""


def encode_snapshot(vector: np.ndarray, state: bytes) -> bytes:
    """Bytes of a snapshot."""
    return b"".join((_LENGTH.pack(len(state)), state, encode_decision(vector, DecisionMeta(attempt=0))))


def decode_snapshot(data: bytes) -> Snapshot:
    """The inverse.

    Raises:
        CorruptMessage: it is none.
    """
    if len(data) < _LENGTH.size:
        raise CorruptMessage("not a snapshot of a run", key="snapshot")
    end = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    return Snapshot(decode_decision(data[end:], "snapshot")[0], data[_LENGTH.size : end])


class Admissions:
    """The coordinator's part. Every leader has one, as any may become the coordinator.

    Args:
        name: of the region.
        communicator: with the others.
        lifecycle: of the invocation.
    """

    def __init__(self, name: str, communicator: Communicator, lifecycle: InvocationLifecycle) -> None:
        self._name, self._communicator, self._lifecycle = name, communicator, lifecycle
        self._asked: EntranceRequest | None = None
        self._changed: float | None = None
        """When the request was first seen as it is; None: it was not looked at yet."""
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._withdrawing: asyncio.Task[None] | None = None
        self._leave = RegionKeys(lifecycle.keys.run).leave
        self.leaves = False
        """Whether this region was asked to leave."""

    def look(self) -> None:
        """Looks beside the training whether a region asks to join, or this one is to leave."""
        now = self._lifecycle.now()
        if now - self._looked >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked = now
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        asked = await self._communicator.table.asked()
        if self._changed is None or asked != self._asked:
            self._asked, self._changed = asked, self._lifecycle.now()
        self.leaves = self.leaves or await self._lifecycle.channel.fetch(self._leave) is not None

    def announcement(
        self, round: int, state: RegionState, schedule: ExchangeSchedule | AdaptiveSchedule, plan: RoundPlan | None
    ) -> Entrance | None:
        """What this region says with its part of a round; None: nothing.

        Args:
            round: that is sent.
            state, schedule: of the region.
            plan: of the round two after it, where rounds are planned.
        """
        asked, members = self._asked, state.members
        if asked is None or members.coordinator(round) != self._name or asked.region == self._name:
            return None
        known = members.entrance
        if known is None or known.region != asked.region:
            takes_part = members.takes_part(asked.region, round + LEAD)
            return None if takes_part or known is not None else Entrance(region=asked.region)
        if isinstance(schedule, AdaptiveSchedule):
            begins = plan is not None and not plan.last
        else:
            begins = round + LEAD <= schedule.rounds
        if known.first is None and asked.ready and begins:
            return Entrance(region=asked.region, first=round + LEAD)
        return None

    def lapsed(self, round: int, state: RegionState) -> str:
        """The region that asks to join and is not heard any more, as this region says with its part of a round; "": none.

        Its request is withdrawn. If it comes back, it asks anew, and begins from a newer state.

        Args:
            round: that is sent.
            state: of the region.
        """
        known = state.members.entrance
        if known is None or known.first is not None or state.members.coordinator(round) != self._name:
            return ""
        if self._changed is None:
            return ""
        asks = self._asked is not None and self._asked.region == known.region
        if asks and self._lifecycle.now() - self._changed < ABSENT_S:
            return ""
        if asks:
            self._asked, self._changed = None, self._lifecycle.now()
            self._withdrawing = asyncio.create_task(self._withdraw(known.region))
        return known.region

    async def _withdraw(self, region: str) -> None:
        asked = await self._communicator.table.asked()
        if asked is not None and asked.region == region:
            await self._communicator.table.withdraw()

    def keep_snapshot(self, state: RegionState, vector: np.ndarray) -> None:
        """Keeps the state after an exchange for a region that joins, beside the training."""
        round = max(state.applied[self._name].values(), default=0)
        if state.members.coordinator(round) != self._name or not state.is_kept_by_all(self._name):
            return
        if self._keeping is None or self._keeping.done():
            data = encode_snapshot(vector, bytes(state.encoded(vector)))
            self._keeping = asyncio.create_task(self._communicator.put_snapshot(round, data))

    async def close(self) -> None:
        """Ends what goes on in the background."""
        tasks = [task for task in (self._looking, self._keeping, self._withdrawing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
