"""What a region sends: its parts of rounds, stored in the region before they are sent, until all other regions have applied them.

Writes of a region's rank 0 that training does not wait for.

What a region stores of an exchange is needed by a replacement only, so training goes on while it is written. The writes of one lane are done one after the
other: what is stored at any time is a beginning of what was done, and a request that tells another region or another function of something follows the writes
that it rests on. Who relies on all of them, a checkpoint for one, calls `settle` first.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.data.split import SampleSplit
from ephemeron.errors import DamagedObject, KeyExists, RegionSuperseded
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.communicator.base import Membership
from ephemeron.regions.policies import AdaptiveSchedule, Due, ExchangeSchedule
from ephemeron.regions.records import RegionKeys, SentMeta, decode_sent, encode_sent
from ephemeron.regions.region_state import RegionState


class OwnUpdates:
    """Updates of this region, by their round. Training does not wait until they are stored and sent.

    Args:
        communicator: with the other regions.
        channel: of the region.
        keys: of the region's exchange.
        writes: those that an update rests on are before it.
    """

    def __init__(self, communicator: Communicator, channel: Channel, keys: RegionKeys, writes: BackgroundWrites) -> None:
        self._communicator, self._channel, self._keys = communicator, channel, keys
        self._kept: dict[Due, Update] = {}
        self._stored: set[Due] = set()
        """By earlier attempts of this rank."""
        self._writes = writes

    def __contains__(self, due: Due) -> bool:
        return due in self._kept

    def __getitem__(self, due: Due) -> Update:
        return self._kept[due]

    async def send_again(self, stored: Iterable[str]) -> list[tuple[Due, int, np.ndarray]]:
        """Sends what earlier attempts have stored: other regions may lack it.

        Args:
            stored: keys of the region's exchange.

        Returns:
            By update: the iteration before which it was sent, and what it lacks by rounding.
        """
        found = []
        for key in stored:
            if key.startswith(self._keys.outgoing):
                data = await self._channel.fetch(key)
                if data is None:
                    continue  # deleted meanwhile: all have it
                due = self._keys.due_of(key)
                update, owed, iteration = self._decoded(due, data, key)
                self._kept[due] = update
                self._stored.add(due)
                await self._communicator.publish(update)
                found.append((due, iteration, owed))
        return found

    def is_stored(self, due: Due) -> bool:
        """Whether an earlier attempt of this rank has stored it."""
        return due in self._stored

    def send(self, update: Update, owed: np.ndarray, *, iteration: int) -> None:
        """Stores an update and sends it, beside the training.

        Args:
            update: of this region.
            owed: what it lacks by rounding.
            iteration: before which it is sent.
        """
        due = Due(update.fragment, update.round)
        self._kept[due] = update
        norm = update.norm if math.isfinite(update.norm) else None
        data = encode_sent(update.payload, owed, SentMeta(iteration=iteration, samples=update.samples, norm=norm))

        async def write() -> None:
            key = self._keys.sent(due)
            try:
                await self._channel.put(key, [data], create=True)
            except KeyExists:
                try:
                    there = await self._channel.fetch(key)
                except DamagedObject:
                    there = None
                    await self._channel.put(key, [data])
                if there is not None and self._decoded(due, there, key)[0].payload != update.payload:
                    raise RegionSuperseded(f"another attempt of region {update.region} has sent round {due.round}") from None
            await self._communicator.publish(update)

        self._writes.add(write)

    def forget(self, done: Iterable[Due]) -> list[str]:
        """Forgets updates that all regions have applied; returns the keys to delete."""
        gone = []
        for due in done:
            del self._kept[due]
            self._stored.discard(due)
            gone.append(self._keys.sent(due))
        return gone

    @property
    def kept(self) -> list[Due]:
        """Updates that other regions may lack."""
        return list(self._kept)

    def _decoded(self, due: Due, data: memoryview, key: str) -> tuple[Update, np.ndarray, int]:
        payload, owed, meta = decode_sent(data, key)
        update = Update(
            region=self._communicator.region,
            fence=self._communicator.fence,
            fragment=due.fragment,
            round=due.round,
            samples=meta.samples,
            norm=math.inf if meta.norm is None else meta.norm,
            payload=payload,
        )
        return update, owed, meta.iteration


def samples_of(split: SampleSplit, schedule: ExchangeSchedule | AdaptiveSchedule, due: Due) -> int:
    """Samples of all ranks of a region since the round before: the weight of its part of a round."""
    first = schedule.sent_before(Due(due.fragment, due.round - 1)) if due.round > 1 else 0
    return sum(
        split.batch_at(rank, i % split.iterations) for i in range(first, schedule.sent_before(due)) for rank in range(len(split.counts))
    )


# -- writes of a region's rank 0 that training does not wait for --------------------------------------------------


class BackgroundWrites:
    """Writes in their order, each begun when the one before has ended. After one that has failed none is begun."""

    def __init__(self) -> None:
        self._tasks: deque[asyncio.Task[None]] = deque()

    def add(self, write: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Does a write after all before it; the task ends with it."""
        before = self._tasks[-1] if self._tasks else None
        task = asyncio.create_task(_after(before, write))
        self._tasks.append(task)
        return task

    async def settle(self, *, but: int = 0) -> None:
        """Waits until all are done, or all but the latest ones.

        Args:
            but: number of the latest ones that may go on.

        Raises:
            EphemeronError: as one of them.
        """
        while self._tasks and (self._tasks[0].done() or len(self._tasks) > but):
            first = self._tasks[0]
            await asyncio.shield(first)
            if self._tasks and self._tasks[0] is first:
                self._tasks.popleft()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends those that are not done; returns what is to be awaited."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)


async def _after(before: asyncio.Task[None] | None, write: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await write()


# -- regions for which a region's updates are kept ----------------------------------------------------------------


class Recipients:
    """Regions that need the updates of another one, as its communicator knows them.

    Args:
        region: that sends.
        names: regions that take part from the beginning.
        communicator: of the region.
    """

    def __init__(self, region: str, names: Iterable[str], communicator: Membership) -> None:
        self._region, self._communicator = region, communicator
        self._kept_for = {name for name in names if name != region}

    def needing(self, state: RegionState) -> list[str]:
        """Regions that need this one's updates, or may do so."""
        members = state.members
        entering = "" if members.entrance is None else members.entrance.region
        latest = max(state.applied[self._region].values(), default=0) + 1
        return [
            name
            for name in members.names
            if name not in ("", self._region)
            and (name == entering or members.takes_part(name, latest) or (members.first_round(name) or 0) > latest)
        ]

    async def follow(self, state: RegionState) -> None:
        """Has the communicator keep updates for the regions that need them, and for no other."""
        needed = set(self.needing(state))
        for name in state.members.names:
            if name != self._region and (name in needed) != (name in self._kept_for):
                await (self._communicator.admit(name) if name in needed else self._communicator.dismiss(name))
        self._kept_for = needed
