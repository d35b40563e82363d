"""Meshes of several members in one event loop, for tests of what runs on top of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.communication.direct.mesh import SILENCE_S, Mesh
from ephemeron.communication.direct.transport import Transport
from ephemeron.communication.keys import Keys

TOKEN = "token of the tests"


class DirectWorld:
    """Members of one run.

    Args:
        ranks: number of members.
        network: that connects them.
        store: where they announce themselves.
        silence_s: see `Mesh`.
    """

    def __init__(
        self, ranks: int, *, network: MemoryNetwork | None = None, store: Channel | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self.ranks, self.silence_s = ranks, silence_s
        self.network = network or MemoryNetwork()
        self.store = store or MemoryChannel()
        self.keys = Keys("run")
        self.meshes: list[Mesh] = []

    async def join(self, rank: int, attempt: int = 0, transports: list[Transport] | None = None, *, waits: bool = False) -> Mesh:
        """A member joins, or a successor that is no member yet."""
        mesh = await Mesh.join(
            store=self.store,
            rank=rank,
            attempt=attempt,
            ranks=self.ranks,
            keys=self.keys,
            token=TOKEN,
            transports=transports or [self.network.transport(rank)],
            silence_s=self.silence_s,
            waits=waits,
        )
        self.meshes.append(mesh)
        return mesh


async def until(holds: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it does not hold in time.
    """
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def all_connected(*meshes: Mesh) -> None:
    """Waits until each of these members has a route to each of the others."""
    await until(lambda: all(a.connected(b.rank) for a in meshes for b in meshes))


@asynccontextmanager
async def memory_mesh(ranks: int, *, latency_s: float = 0.0, bandwidth_mb_s: float | None = None) -> AsyncIterator[list[Mesh]]:
    """Connected meshes of as many members, in one event loop."""
    world = DirectWorld(ranks, network=MemoryNetwork(latency_s=latency_s, bandwidth_mb_s=bandwidth_mb_s))
    try:
        meshes = [await world.join(rank) for rank in range(ranks)]
        await all_connected(*meshes)
        yield meshes
    finally:
        for mesh in world.meshes:
            await mesh.close()
