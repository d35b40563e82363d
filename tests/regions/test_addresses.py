"""Communicators over TCP that find each other in the table of the control function, which dies meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from test_control import World

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import RegionSuperseded
from ephemeron.functions import simulation
from ephemeron.regions.communicator.base import Update
from ephemeron.regions.communicator.network import ControlledAddresses, RegionNetwork
from ephemeron.regions.communicator.tcp import TcpCommunicator
from ephemeron.regions.control.function import ControlRequest
from ephemeron.training.worker.spec import GroupNetwork

pytestmark = pytest.mark.slow
NAMES, TOKEN = ("east", "north"), "token of the tests"


def addresses(world: World, region: str, *, identity: str = "", fence: int = 1) -> ControlledAddresses:
    request = ControlRequest(idle_s=30.0, lease_s=1.5)
    client = world.client(owner=f"{region}-{fence}", request=request, answer_s=0.5)
    return ControlledAddresses(client, region=region, identity=identity or region, fence=fence, renew_every_s=0.5)


def communicator(store: MemoryChannel, world: World, region: str, *, fence: int = 1) -> TcpCommunicator:
    # East listens nowhere: it is the one that connects.
    network = GroupNetwork(listen="" if region == "east" else "127.0.0.1:0")
    return TcpCommunicator(
        store,
        RegionNetwork(network, token=TOKEN),
        run="run",
        token=TOKEN,
        region=region,
        identity=region,
        fence=fence,
        names=NAMES,
        addresses=addresses(world, region, fence=fence),
        leave_s=1.0,
    )


def update(region: str, number: int) -> Update:
    return Update(region=region, fence=1, fragment=0, round=number, samples=1, norm=1.0, payload=b"%d" % number)


async def found(at: TcpCommunicator, region: str, number: int) -> bytes:
    return (await at.get(region, 0, number, deadline=asyncio.get_running_loop().time() + 30)).payload


def test_an_endpoint_that_changes_is_found_though_the_control_function_dies() -> None:
    async def scenario() -> None:
        store, world = MemoryChannel(), World()
        async with communicator(store, world, "east") as east:
            async with communicator(store, world, "north") as north:
                await asyncio.gather(east.join(), north.join())
                assert [member.endpoint for member in await store_members(north)] == ["", ""]
                await north.publish(update("north", 1))
                assert await found(east, "north", 1) == b"1"
                first = north.endpoint
            await world.kill(max(world.running))
            for fence in (1, 2):  # the same attempt listens elsewhere, and then its replacement does
                async with communicator(store, world, "north", fence=fence) as north:
                    await north.join()
                    assert north.endpoint != first
                    await north.publish(update("north", 1 + fence))
                    assert await found(east, "north", 1 + fence) == b"%d" % (1 + fence)
                    await asyncio.sleep(0)
        assert len([call for call in world.calls if call.entry == "geo-addressing"]) >= 2, "it was replaced"
        for task in world.running.values():
            task.cancel()
        await asyncio.gather(*world.running.values(), return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 240))


async def store_members(at: TcpCommunicator) -> list[object]:
    return list(await at.table.members())


def test_an_address_of_an_older_attempt_or_another_launch_is_refused() -> None:
    async def scenario() -> None:
        world = World()
        await addresses(world, "north", fence=3).announce("a:1")
        with pytest.raises(RegionSuperseded, match="replaced by attempt 3"):
            await addresses(world, "north", fence=2).announce("b:1")
        with pytest.raises(RegionSuperseded, match="registered by another run, at a:1"):
            await addresses(world, "north", identity="another", fence=9).announce("c:1")
        book = addresses(world, "east")
        assert (await book.look_up())["north"].endpoint == "a:1"
        while await book.look_up():  # noqa: ASYNC110 - until its lease has ended
            await asyncio.sleep(0.1)
        for task in world.running.values():
            task.cancel()
        await asyncio.gather(*world.running.values(), return_exceptions=True)

    simulation.run(scenario())
