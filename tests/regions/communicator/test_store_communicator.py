"""The communicator over a store passes the tests of all communicators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import ChannelTimeout
from ephemeron.functions import simulation
from ephemeron.regions.communicator import Communicator
from ephemeron.regions.communicator.base import Update
from ephemeron.regions.communicator.store import StoreCommunicator
from ephemeron.testing.communicator_contract import CommunicatorContract, CommunicatorWorld


class StoreWorld(CommunicatorWorld):
    def __init__(self) -> None:
        self.store = MemoryChannel()

    def communicator(self, region: str, *, identity: str, fence: int, names: Sequence[str]) -> Communicator:
        return StoreCommunicator(self.store, run="run", region=region, identity=identity, fence=fence, names=names)


class TestStoreCommunicator(CommunicatorContract):
    @pytest.fixture
    def world(self) -> StoreWorld:
        return StoreWorld()


def test_an_update_that_is_watched_for_and_waited_for_is_read_once() -> None:
    async def go() -> None:
        world = StoreWorld()
        names = ("east", "west")
        east, west = (world.communicator(name, identity=name, fence=1, names=names) for name in names)
        async with east, west:
            await east.join()
            await west.join()
            assert not west.arrived({})  # watches from the first round on
            loop = asyncio.get_running_loop()
            waiting = [asyncio.create_task(west.get("east", 0, n, deadline=loop.time() + 60)) for n in (1, 2, 1)]
            for number in (1, 2):
                await east.publish(Update(region="east", fence=1, fragment=0, round=number, samples=1, norm=1.0, payload=b"x" * 1000))
            assert [(await each).round for each in waiting] == [1, 2, 1]
            with pytest.raises(ChannelTimeout):
                await west.get("east", 0, 3, deadline=loop.time() + 1)
            (sent,), (received,) = east.meter.values(), west.meter.values()
            assert received.received == sent.sent

    simulation.run(go())


class SlowDeletes(MemoryChannel):
    """Deletes are answered when `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = asyncio.Event(), False

    async def delete(self, keys: Sequence[str]) -> None:
        self.asked = True
        await self.answers.wait()
        await super().delete(keys)


def test_an_update_is_published_before_older_ones_are_deleted() -> None:
    async def go() -> None:
        world = StoreWorld()
        store = world.store = SlowDeletes()
        names = ("east", "west")
        east, west = (world.communicator(name, identity=name, fence=1, names=names) for name in names)
        async with east, west:
            await east.join()
            await west.join()
            deadline = asyncio.get_running_loop().time() + 60
            for number in (1, 2, 3):
                for sender, receiver in ((east, west), (west, east)):
                    name = sender.region
                    await sender.publish(Update(region=name, fence=1, fragment=0, round=number, samples=1, norm=1.0, payload=b"x"))
                    await receiver.get(name, 0, number, deadline=deadline)
                    await receiver.acknowledge(name, 0, number)
            assert store.asked, "a round was deleted while the next ones were published"
            store.answers.set()
            await east.leave(after=3)
            left = await store.list("run/groups/east/")
            assert left
            assert not any(key.endswith("0000001") for key in left)

    simulation.run(go())
