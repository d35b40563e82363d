"""Meshes and their channel over real sockets, with a proxy between every two members."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ephemeron.communication.direct import Mesh, store_route
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.direct.peer_channel import Exchange, PeerChannel
from ephemeron.testing.direct_world import DirectWorld, all_connected, until
from ephemeron.testing.pair_proxies import PairProxies

SILENCE_S = 0.4


class Proxied:
    """Members that are connected through proxies, each with its channel."""

    def __init__(self, ranks: int) -> None:
        self.world, self.proxies = DirectWorld(ranks, silence_s=SILENCE_S), PairProxies()
        self.channels: list[PeerChannel] = []

    @property
    def meshes(self) -> list[Mesh]:
        return self.world.meshes

    async def join(self, rank: int, attempt: int = 0) -> PeerChannel:
        mesh = await self.world.join(rank, attempt, [self.proxies.transport(rank)])
        others = [r for r in range(self.world.ranks) if r != rank]
        self.channels.append(PeerChannel(self.world.store, mesh, lambda key: Exchange(int(key[0]), others)))
        return self.channels[-1]


@contextlib.asynccontextmanager
async def proxied(ranks: int) -> AsyncIterator[Proxied]:
    p = Proxied(ranks)
    try:
        for rank in range(ranks):
            await p.join(rank)
        await all_connected(*p.meshes)
        await until(lambda: all(m.transport_of(r) == "tcp" for m in p.meshes for r in range(ranks) if r != m.rank))
        yield p
    finally:
        for channel in p.channels:
            await channel.leave()
        for mesh in p.meshes:
            await mesh.close()
        await p.proxies.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(main())


async def exchanged(p: Proxied, name: str, size: int = 1000) -> None:
    """Every member puts an object, and every other one gets it."""
    deadline = asyncio.get_running_loop().time() + 60
    for channel in p.channels:
        await channel.put(f"{channel.mesh.rank}/{name}", [bytes([channel.mesh.rank]) * size])
    for channel in p.channels:
        for r in range(p.world.ranks):
            got = await channel.get(f"{r}/{name}", deadline=deadline)
            assert bytes(got.data) == bytes([r]) * size


def test_a_half_open_connection_is_given_up_and_a_third_forwards() -> None:
    async def scenario() -> None:
        async with proxied(3) as p:
            p.proxies.swallow(0, 1)
            carried = p.proxies.pair(0, 1).carried
            await exchanged(p, "a")
            await until(lambda: p.meshes[0].transport_of(1) == "forwarded" == p.meshes[1].transport_of(0))
            assert p.proxies.pair(0, 1).carried == carried
            p.proxies.heal(0, 1)
            await until(lambda: p.meshes[0].transport_of(1) == "tcp" == p.meshes[1].transport_of(0))
            await exchanged(p, "b")

    run(scenario)


def test_resets_in_the_middle_of_messages_lose_none() -> None:
    async def scenario() -> None:
        async with proxied(3) as p:
            for pair in ((0, 1), (0, 2), (1, 2)):
                p.proxies.slow(*pair, delay_s=0.005, mb_s=20.0)
            for n in range(3):
                task = asyncio.create_task(exchanged(p, str(n), size=1_000_000))
                await asyncio.sleep(0.02 * n)
                for pair in ((0, 1), (0, 2), (1, 2)):
                    p.proxies.reset(*pair)
                await task

    run(scenario)


def test_a_pair_that_is_cut_off_talks_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_route, "STORE_AFTER_S", 0.05)

    async def scenario() -> None:
        async with proxied(2) as p:
            p.proxies.cut(0, 1)
            await until(lambda: not p.meshes[0].connected(1) or p.meshes[0].transport_of(1) == "store")
            await exchanged(p, "a")
            p.proxies.heal(0, 1)
            await until(lambda: p.meshes[0].transport_of(1) == "tcp" == p.meshes[1].transport_of(0))
            await exchanged(p, "b")

    run(scenario)


def test_a_slow_link_is_not_taken_for_a_dead_one() -> None:
    """The body takes several times as long as a silence that is given up, and bytes arrive all the time."""

    async def scenario() -> None:
        async with proxied(2) as p:
            p.proxies.slow(0, 1, delay_s=0.02, mb_s=2.0)
            lost: list[int] = []
            for mesh in p.meshes:
                mesh.on_lost.append(lost.append)
            await exchanged(p, "a", size=3_000_000)
            assert not lost

    run(scenario)


def test_late_bytes_of_a_replaced_member_arrive_nowhere() -> None:
    async def scenario() -> None:
        async with proxied(3) as p:
            got: list[tuple[int, int]] = []

            def note(rank: int, head: Head, body: memoryview) -> None:
                got.append((rank, head.number))

            p.meshes[0].handle(Kind.CONTRIBUTION, note)
            zombie = p.meshes[1]
            p.proxies.slow(0, 1, delay_s=0.3, mb_s=100.0)
            zombie.send(0, Kind.CONTRIBUTION, 1)
            new = (await p.join(1, attempt=1)).mesh
            await until(lambda: p.meshes[0].attempt_of(1) == 1)
            p.proxies.heal(0, 1)
            zombie.send(0, Kind.CONTRIBUTION, 2)
            await until(lambda: new.send(0, Kind.CONTRIBUTION, 3) and (1, 3) in got)
            await until(lambda: zombie.superseded)
            assert (1, 2) not in got

    run(scenario)
