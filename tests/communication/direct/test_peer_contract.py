"""The contract of channels, between members: one member writes, the others read."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.communication.direct import LinkFailed, peer_channel
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Kind
from ephemeron.communication.direct.peer_channel import Exchange, PeerChannel, PushedChannel
from ephemeron.communication.direct.transport import SharedTransport, Transport, UnixTransport
from ephemeron.testing.channel_contract import ChannelConnectionContract, ChannelContract
from ephemeron.testing.direct_world import DirectWorld, all_connected, until


class Parties(Wrapper):
    """Rank 0 writes; each read is made by the next one of the others, once messages on their way have arrived."""

    def __init__(self, channels: Sequence[PeerChannel | PushedChannel], store: Channel) -> None:
        super().__init__(store)
        self.channels = channels
        self.writer, self.readers = channels[0], itertools.cycle(channels[1:])
        self.traits = self.writer.traits

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self.writer.put(key, buffers, create=create)

    async def delete(self, keys: Iterable[str]) -> None:
        await self.writer.delete(keys)

    async def fetch(self, key: str) -> memoryview | None:
        await self._arrived()
        return await next(self.readers).fetch(key)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        await self._arrived()
        return await next(self.readers).get(key, deadline=deadline, expected_at=expected_at)

    async def list(self, prefix: str) -> list[str]:
        await self._arrived()
        return await next(self.readers).list(prefix)

    async def exists(self, key: str) -> bool:
        await self._arrived()
        return await next(self.readers).exists(key)

    async def _arrived(self) -> None:
        """Connections keep the order: an answer comes after all that was sent before it."""
        for channel in self.channels:
            if isinstance(channel, PeerChannel) and channel._tasks:
                await asyncio.wait(list(channel._tasks))
        meshes = [channel.mesh for channel in self.channels]
        await asyncio.gather(*(answered(a, b) for a, b in itertools.permutations(meshes, 2) if a.connected(b.rank)))


async def answered(a: Mesh, b: Mesh) -> None:
    while True:
        try:
            await a.request(b.rank, Kind.STATUS, timeout_s=30)
            return
        except LinkFailed:  # both had dialled at once, and have closed one connection
            await all_connected(a, b)


async def nothing(*told: object) -> list[Buffer]:
    return []


class Members:
    members = 3
    pushed = True
    cut: tuple[tuple[int, int], ...] = ()
    made: Callable[[], list[Transport]] | None = None
    stored = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Channel]:
        network = MemoryNetwork()
        for a, b in self.cut:
            network.partition(a, b)
        world = DirectWorld(self.members, network=network)
        channels: list[PeerChannel | PushedChannel] = []
        exchange = Exchange(0, range(1, self.members)) if self.pushed else Exchange(None, None)
        try:
            for rank in range(self.members):
                mesh = await world.join(rank, transports=None if self.made is None else self.made())
                mesh.answer(Kind.STATUS, nothing)
                kind = PushedChannel if self.stored else PeerChannel
                channels.append(kind(world.store, mesh, lambda key: exchange))
            await self.ready(world.meshes)
            yield Parties(channels, world.store)
            assert self.stored or not world.store.objects.keys() - {world.keys.peer(r, 0) for r in range(self.members)}
        finally:
            for channel in channels:
                await channel.leave()
            for mesh in world.meshes:
                await mesh.close()

    async def ready(self, meshes: list[Mesh]) -> None:
        await all_connected(*meshes)


class PeerContract(Members, ChannelContract):
    readers = 20
    many_keys = 300


class TestPushed(PeerContract):
    """As contributions and merged shards are."""


class TestPushedAndStored(PeerContract):
    """As under policies that let ranks run ahead."""

    stored = True


class TestStoredAlone(PeerContract):
    """Between members that cannot connect."""

    stored = True
    cut = ((0, 1), (0, 2))

    async def ready(self, meshes: list[Mesh]) -> None:
        await all_connected(*meshes[1:])


class TestAskedFor(PeerContract):
    """As activations are."""

    pushed = False


class TestOverSockets(Members, ChannelConnectionContract):
    made = staticmethod(lambda: [UnixTransport()])


class TestOverSharedMemory(Members, ChannelConnectionContract):
    made = staticmethod(lambda: [SharedTransport()])


class TestThroughAThird(Members, ChannelConnectionContract):
    cut = ((0, 1),)


class TestThroughTheStore(Members, ChannelConnectionContract):
    members = 2
    cut = ((0, 1),)

    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peer_channel, "STORE_AFTER_S", 0.0)

    async def ready(self, meshes: list[Mesh]) -> None:
        await until(lambda: all(mesh.attempt_of(1 - mesh.rank) <= 0 for mesh in meshes))
