"""What a region sends: its parts of rounds, stored in the region before they are sent, until all other regions have applied them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.data.split import SampleSplit
from ephemeron.errors import DamagedObject, KeyExists, RegionSuperseded
from ephemeron.regions.background_writes import BackgroundWrites
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.policies import AdaptiveSchedule, Due, ExchangeSchedule
from ephemeron.regions.records import RegionKeys, SentMeta, decode_sent, encode_sent


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
