"""Pairs that change to a better connection: nothing is lost, nothing overtakes, and slow connections are told from quick ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from ephemeron.communication.direct import Head, Mesh, upgrades
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.communication.direct.message import Kind
from ephemeron.communication.direct.peer_channel import Exchange, PeerChannel
from ephemeron.functions import simulation
from ephemeron.testing.direct_world import DirectWorld, until


class Pair(NamedTuple):
    """Two members in virtual time with two networks between them."""

    first: MemoryNetwork
    second: MemoryNetwork
    meshes: list[Mesh]

    @property
    def transports(self) -> tuple[str, str]:
        return self.meshes[0].transport_of(1), self.meshes[1].transport_of(0)

    async def become(self, transport: str, within_s: float = 60.0) -> None:
        await until(lambda: self.transports == (transport, transport), within_s=within_s)


@asynccontextmanager
async def pair(names: tuple[str, str], *networks: MemoryNetwork, cut: bool = True) -> AsyncIterator[Pair]:
    """`cut`: over the first network the two cannot connect at the beginning."""
    world = DirectWorld(2)
    if cut:
        networks[0].partition(0, 1)
    try:
        for rank in range(2):
            await world.join(rank, 0, [n.transport(rank, name) for n, name in zip(networks, names, strict=True)])
        made = Pair(*networks, world.meshes)
        await until(lambda: all(name in names for name in made.transports))
        yield made
    finally:
        for mesh in world.meshes:
            await mesh.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10_000):
            await scenario()

    simulation.run(main())


class Traffic:
    """Numbered messages in both directions, as long as it is open, and what has arrived of them."""

    def __init__(self, meshes: list[Mesh], nbytes: int, every_s: float) -> None:
        self._meshes, self._nbytes, self._every_s = meshes, nbytes, every_s
        self.sent, self.got = [0, 0], [list[int](), list[int]()]
        self._tasks: list[asyncio.Task[None]] = []

    def _take(self, rank: int) -> Callable[[int, Head, memoryview], None]:
        def take(sender: int, head: Head, body: memoryview) -> None:
            assert bytes(body) == bytes([head.number % 251]) * self._nbytes
            self.got[rank].append(head.number)

        return take

    async def _send(self, rank: int) -> None:
        while True:
            body = bytes([self.sent[rank] % 251]) * self._nbytes
            assert self._meshes[rank].send(1 - rank, Kind.CONTRIBUTION, self.sent[rank], buffers=[body])
            self.sent[rank] += 1
            await asyncio.sleep(self._every_s)

    async def __aenter__(self) -> Traffic:
        for mesh in self._meshes:
            mesh.handle(Kind.CONTRIBUTION, self._take(mesh.rank))
        self._tasks = [asyncio.create_task(self._send(rank)) for rank in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_arrived(self) -> None:
        await until(lambda: [len(got) for got in self.got] == self.sent[::-1], within_s=200)
        assert self.got == [list(range(n)) for n in self.sent[::-1]]


def test_a_relayed_pair_is_punched_once_that_works_and_its_messages_stay_in_order() -> None:
    async def scenario() -> None:
        slow = MemoryNetwork(latency_s=0.4, bandwidth_mb_s=2.0)
        async with pair(("punched", "relay"), MemoryNetwork(latency_s=0.001), slow) as p:
            assert p.transports == ("relay", "relay")
            told: list[int] = []
            for mesh in p.meshes:
                mesh.on_connect.append(lambda rank, attempt: told.append(rank))
                mesh.on_lost.append(told.append)
            async with Traffic(p.meshes, 20_000, 0.011) as traffic:
                await asyncio.sleep(30)
                assert p.transports == ("relay", "relay")
                p.first.heal(0, 1)
                await p.become("punched")
                await asyncio.sleep(20)
            await traffic.all_arrived()
            assert not told, "no message was lost"
            assert not slow.connections, "the relay is left"
            assert sum(mesh.sent_bytes for mesh in p.meshes) > sum(traffic.sent) * 20_000

    run(scenario)


@pytest.mark.parametrize("silent", [False, True], ids=["reset", "silent"])
def test_a_connection_that_is_lost_during_the_change_counts_as_lost(silent: bool) -> None:
    """The relay holds seconds of messages when it ends: what they carried is sent again over the new connection."""

    async def scenario() -> None:
        slow = MemoryNetwork(latency_s=0.5, bandwidth_mb_s=0.05)
        async with pair(("punched", "relay"), MemoryNetwork(latency_s=0.001), slow) as p:
            channels = [PeerChannel(DirectWorld(2).store, m, lambda key: Exchange(int(key[0]), [0, 1])) for m in p.meshes]
            lost: list[int] = []
            for number in range(100):
                if number == 20:
                    p.first.heal(0, 1)
                for channel in channels:
                    await channel.put(f"{channel.mesh.rank}/{number}", [bytes([number]) * 30_000])
                if "punched" in p.transports and p.second.connections:
                    lost.append(number)
                    p.second.partition(0, 1, silent=silent)
                await asyncio.sleep(0.5)
            deadline = asyncio.get_running_loop().time() + 60
            for channel in channels:
                for number in range(100):
                    got = await channel.get(f"{1 - channel.mesh.rank}/{number}", deadline=deadline)
                    assert bytes(got.data) == bytes([number]) * 30_000
            assert p.transports == ("punched", "punched")
            assert lost, "while messages were on their way"
            for channel in channels:
                await channel.leave()

    run(scenario)


def test_a_transport_that_connects_quickly_and_carries_slowly_is_left() -> None:
    async def scenario() -> None:
        slow = MemoryNetwork(bandwidth_mb_s=1.0)
        quick = MemoryNetwork(bandwidth_mb_s=100.0, setup_s=0.5)
        async with pair(("websocket", "punched"), slow, quick, cut=False) as p:
            assert p.transports == ("websocket", "websocket")
            async with Traffic(p.meshes, 1000, 0.05) as traffic:
                await p.become("punched")
                await asyncio.sleep(1000)
                assert p.transports == ("punched", "punched")
            await traffic.all_arrived()

    run(scenario)


def test_a_connection_that_is_not_much_quicker_is_not_changed_to() -> None:
    async def scenario() -> None:
        networks = MemoryNetwork(bandwidth_mb_s=30.0), MemoryNetwork(bandwidth_mb_s=40.0)
        async with pair(("websocket", "punched"), *networks, cut=False) as p:
            await asyncio.sleep(3000)
            assert p.transports == ("websocket", "websocket")
            assert len(networks[1].connections) == 0
            sent = p.meshes[0].sent_bytes
            await asyncio.sleep(3000)
            assert p.meshes[0].sent_bytes - sent < upgrades.MEASURED_BYTES, "nothing is measured any more"

    run(scenario)


def test_a_connection_that_ends_right_after_the_change_leaves_the_pair_connected() -> None:
    async def scenario() -> None:
        slow = MemoryNetwork(latency_s=2.0, bandwidth_mb_s=2.0)
        async with pair(("punched", "relay"), MemoryNetwork(latency_s=0.001), slow) as p:
            p.first.heal(0, 1)
            await until(lambda: "punched" in p.transports)
            p.first.partition(0, 1)
            await until(lambda: p.transports == ("relay", "relay"))
            inbox: list[int] = []
            p.meshes[1].handle(Kind.CONTRIBUTION, lambda rank, head, body: inbox.append(head.number))
            p.meshes[0].send(1, Kind.CONTRIBUTION, 7)
            await until(lambda: inbox == [7])
            p.first.heal(0, 1)
            await p.become("punched", within_s=400)

    run(scenario)


def test_the_higher_rank_tries_where_the_lower_one_cannot() -> None:
    async def scenario() -> None:
        slow = MemoryNetwork(latency_s=0.1)
        async with pair(("tcp", "relay"), MemoryNetwork(), slow) as p:
            p.meshes[0]._transports["tcp"].reaches = lambda own, theirs: False  # type: ignore[method-assign]
            p.first.heal(0, 1)
            async with Traffic(p.meshes, 1000, 0.03) as traffic:
                await p.become("tcp")
            await traffic.all_arrived()

    run(scenario)


def test_pairs_on_one_machine_and_members_with_one_transport_try_nothing() -> None:
    async def scenario() -> None:
        async with pair(("shared", "tcp"), MemoryNetwork(), MemoryNetwork(), cut=False) as p:
            await asyncio.sleep(5)
            sent = p.meshes[0].sent_bytes
            await asyncio.sleep(1000)
            assert p.transports == ("shared", "shared")
            assert p.meshes[0].sent_bytes - sent < 1000 * 60, "questions whether the other one lives"

    run(scenario)
