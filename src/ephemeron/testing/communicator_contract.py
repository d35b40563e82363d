"""Tests that every communicator of regions passes.

    class TestMine(CommunicatorContract):
        @pytest.fixture
        def world(self): ...            # a `CommunicatorWorld`

`CommunicatorConnectionContract` is the part of it that a variant needs (certificates, a relay) of a communicator that passes the
whole. Each test is a coroutine of its own event loop, in real time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from ephemeron.errors import ChannelTimeout, JobError, RegionSuperseded
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.communicator.members import EntranceRequest, note_absent

NAMES = ("east", "north", "west")
_LIMIT_S = 120.0


class CommunicatorWorld(ABC):
    """Communicators of one run, in one event loop."""

    @abstractmethod
    def communicator(self, region: str, *, identity: str, fence: int, names: Sequence[str]) -> Communicator:
        """One that was not entered."""

    async def __aenter__(self) -> CommunicatorWorld:
        """In the event loop of the test."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None


def update(region: str, number: int, payload: bytes = b"", *, fragment: int = 0, fence: int = 1) -> Update:
    """An update whose payload says where it is from."""
    return Update(
        region=region,
        fence=fence,
        fragment=fragment,
        round=number,
        samples=10 + number,
        norm=1.5,
        payload=payload or f"{region} {fragment} {number}".encode(),
    )


async def received(communicator: Communicator, region: str, number: int, *, fragment: int = 0) -> bytes:
    """Payload of an update of another region."""
    deadline = asyncio.get_running_loop().time() + _LIMIT_S
    return (await communicator.get(region, fragment, number, deadline=deadline)).payload


class Opened:
    """Communicators that a test opens.

    Args:
        world: of the test.
        stack: closes them.
        names: regions that take part from the beginning.
    """

    def __init__(self, world: CommunicatorWorld, stack: AsyncExitStack, names: Sequence[str]) -> None:
        self._world, self._stack, self._names = world, stack, names

    async def __call__(self, region: str, *, fence: int = 1, identity: str = "", since: int = 0) -> Communicator:
        """A communicator that has joined."""
        made = self._world.communicator(region, identity=identity or f"launch of {region}", fence=fence, names=self._names)
        await self._stack.enter_async_context(made)
        await made.join(since=since)
        return made


def together(world: CommunicatorWorld, work: Callable[[Opened], Awaitable[None]], names: Sequence[str] = NAMES[:2]) -> None:
    """Runs a test in an event loop of its own."""

    async def run() -> None:
        async with asyncio.timeout(2 * _LIMIT_S), world, AsyncExitStack() as stack:
            await work(Opened(world, stack, names))

    asyncio.run(run())


class CommunicatorConnectionContract:
    """Connection part of the contract: that it connects, carries bytes unchanged, and reports errors of its own kind."""

    def test_every_region_receives_what_the_others_publish(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            regions = [await opened(name) for name in NAMES]
            for number in (1, 2):
                for each in regions:
                    for fragment in (0, 1):
                        await each.publish(update(each.region, number, fragment=fragment))
            for each in regions:
                for other in regions:
                    if other is not each:
                        for fragment in (0, 1):
                            found = await received(each, other.region, 2, fragment=fragment)
                            assert found == f"{other.region} {fragment} 2".encode()
            meter = regions[0].meter.values()
            assert sum(each.sent for each in meter) > 0 < sum(each.received for each in meter)

        together(world, work, NAMES)

    def test_large_and_empty_updates_arrive_whole(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east, west = await opened("east"), await opened("north")
            large = bytes(range(256)) * 4096 * 3
            await east.publish(update("east", 1, large))
            await east.publish(update("east", 2, b"\0"))
            assert await received(west, "east", 1) == large
            assert await received(west, "east", 2) == b"\0"
            assert west.links["east"].round_trip_s is not None

        together(world, work)

    def test_what_does_not_come_is_not_waited_for_beyond_the_deadline(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east = await opened("east")
            await opened("north")
            with pytest.raises(ChannelTimeout):
                await east.get("north", 0, 1, deadline=asyncio.get_running_loop().time() - 1)

        together(world, work)

    def test_a_second_launch_of_a_region_is_refused(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            await opened("east")
            with pytest.raises(JobError, match="takes part already"):
                await opened("east", identity="another launch")
            with pytest.raises(JobError, match="takes part already"):
                await opened("east", identity="another launch", fence=5)

        together(world, work)

    def test_an_older_attempt_is_refused(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            await opened("east", fence=3)
            with pytest.raises(RegionSuperseded):
                await opened("east", fence=2)

        together(world, work)


class CommunicatorContract(CommunicatorConnectionContract):
    """The whole contract; see the module."""

    def test_the_first_payload_of_a_round_stays(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east, north = await opened("east"), await opened("north")
            await east.publish(update("east", 1, b"first"))
            assert await received(north, "east", 1) == b"first"
            await east.publish(update("east", 1, b"second"))
            await east.publish(update("east", 2))
            await received(north, "east", 2)
            assert await received(north, "east", 1) == b"first"

        together(world, work)

    def test_what_has_arrived_is_listed_in_order_and_once_it_is_acknowledged_no_more(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            regions = [await opened(name) for name in NAMES]
            east = regions[0]
            east.arrived({})
            for each in regions[1:]:
                for number in (1, 2):
                    await each.publish(update(each.region, number))
            while len(found := east.arrived({})) < 4:  # noqa: ASYNC110 - what has arrived is not waited for
                await asyncio.sleep(0.01)
            assert [(u.region, u.round) for u in found] == [("north", 1), ("north", 2), ("west", 1), ("west", 2)]
            assert [u.round for u in east.arrived({"north": {0: 1}, "west": {0: 2}})] == [2]
            await east.acknowledge("north", 0, 1)
            assert next((u.region, u.round) for u in east.arrived({"north": {0: 1}})) == ("north", 2)

        together(world, work, NAMES)

    def test_a_replacement_reads_again_what_was_not_acknowledged(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east, north = await opened("east"), await opened("north")
            for number in (1, 2, 3):
                await east.publish(update("east", number))
                assert await received(north, "east", number)
            await north.acknowledge("east", 0, 1)
            again = await opened("north", fence=2)
            for number in (2, 3):
                assert await received(again, "east", number) == f"east 0 {number}".encode()
            await again.publish(update("north", 1, fence=2))
            assert await received(east, "north", 1)

        together(world, work)

    def test_a_region_that_joins_later_has_a_snapshot_and_the_rounds_after_it(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east, north = await opened("east"), await opened("north")
            for number in (1, 2, 3):
                await east.publish(update("east", number))
                await received(north, "east", number)
            await north.put_snapshot(2, b"state " * 100_000)
            await east.put_snapshot(1, b"older")
            west = await opened("west", since=2)
            assert await west.latest_snapshot() == (2, b"state " * 100_000)
            assert await received(west, "east", 3) == b"east 0 3"
            assert {m.region: m.since for m in await west.members()} == {"east": 0, "north": 0, "west": 2}

        together(world, work, NAMES)

    def test_updates_are_kept_for_a_region_that_is_admitted(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east, north = await opened("east"), await opened("north")
            await east.admit("west")
            for number in (1, 2, 3):
                await east.publish(update("east", number))
                assert await received(north, "east", number)
                await north.acknowledge("east", 0, number)
                await north.publish(update("north", number))
                assert await received(east, "north", number)
                await east.acknowledge("north", 0, number)
            west = await opened("west")
            for number in (1, 2, 3):
                assert await received(west, "east", number) == f"east 0 {number}".encode()

        together(world, work)

    def test_a_region_is_excused_until_it_joins_as_one_that_comes_later(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east = await opened("east")
            west = world.communicator("west", identity="launch of west", fence=1, names=NAMES)
            assert not await east.table.is_absent("west")
            assert await note_absent(east.table.channel, "run", "west")
            assert not await note_absent(east.table.channel, "run", "east"), "it takes part"
            assert await east.table.is_absent("west")
            async with west:
                with pytest.raises(RegionSuperseded, match="too late"):
                    await west.join()
                await west.join(enters=True)
                assert await west.table.ask(EntranceRequest(region="west"))
                assert not await east.table.ask(EntranceRequest(region="north")), "one at a time"
                assert await east.table.asked() == EntranceRequest(region="west")

        together(world, work)

    def test_what_a_region_published_before_it_left_arrives(self, world: CommunicatorWorld) -> None:
        async def work(opened: Opened) -> None:
            east = await opened("east")
            await east.publish(update("east", 1))
            async with asyncio.TaskGroup() as group:
                group.create_task(east.leave(after=1))
                north = await opened("north")
                assert await received(north, "east", 1) == b"east 0 1"
                await north.acknowledge("east", 0, 1)
            (left,) = [m for m in await north.members() if m.region == "east"]
            assert left.left == 1

        together(world, work)
