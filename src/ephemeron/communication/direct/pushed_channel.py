"""A run's channel whose exchange objects are in the store, and are sent to their readers as well.

For policies under which ranks run ahead of each other (SSP, ASP, HSP): a function that hands off has contributions that others have not used yet,
and all may hand off at once, so members' memory is no place for them. Everything is as durable as in the store; what is read
has usually arrived before it is asked for, which saves its request and its latency.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ephemeron.communication.channels.base import GROWTH, Buffer, Channel, Received, Traits, Wrapper
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.direct.peer_channel import LATENCY_S, Exchange
from ephemeron.errors import ChannelTimeout

FIRST_STEP_S, MOST_STEP_S = 0.05, 0.5
"""Between looks into the store for an object that has not arrived."""


class PushedChannel(Wrapper):
    """See the module. Closing it does not close mesh and store.

    Args:
        store: the run's channel.
        mesh: of this member.
        exchange: who exchanges the object of a key; None: it is read from the store only.
    """

    def __init__(self, store: Channel, mesh: Mesh, exchange: Callable[[str], Exchange | None]) -> None:
        super().__init__(store)
        self.mesh, self._exchange = mesh, exchange
        self.traits = Traits(service=store.traits.service, waits=True, shared=store.traits.shared, latency_s=LATENCY_S)
        self._arrived: dict[str, memoryview] = {}
        self._waiting: dict[str, list[asyncio.Future[memoryview]]] = {}
        mesh.handle(Kind.OBJECT, self._on_object)
        mesh.handle(Kind.DELETED, self._on_deleted)

    async def leave(self) -> None:
        """Nothing goes on in the background."""

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self.inner.put(key, buffers, create=create)
        exchange = self._exchange(key)
        if exchange is not None and exchange.readers is not None:
            data = b"".join(buffers)  # the caller may change its memory
            for rank in exchange.readers:
                if rank != self.mesh.rank:
                    self.mesh.send(rank, Kind.OBJECT, extra=key.encode(), buffers=[data])

    async def fetch(self, key: str) -> memoryview | None:
        return self._arrived[key] if key in self._arrived else await self.inner.fetch(key)

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        exchange = self._exchange(key)
        if exchange is None:
            return await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        loop = asyncio.get_running_loop()
        began, step_s = loop.time(), FIRST_STEP_S
        arrival: asyncio.Future[memoryview] = loop.create_future()
        self._waiting.setdefault(key, []).append(arrival)
        try:
            while True:
                data = await self._looked(key, arrival, step_s if key not in self._arrived else 0.0)
                if data is not None:
                    return Received(data, loop.time() - began)
                if loop.time() >= deadline:
                    raise ChannelTimeout(f"nothing there after {loop.time() - began:.1f} s", key=key)
                step_s = min(step_s * GROWTH, MOST_STEP_S, max(deadline - loop.time(), 0.0))
        finally:
            self._waiting[key].remove(arrival)
            if not self._waiting[key]:
                del self._waiting[key]

    async def _looked(self, key: str, arrival: asyncio.Future[memoryview], within_s: float) -> memoryview | None:
        """An object that is here, or arrives, or is in the store after some seconds."""
        await asyncio.wait([arrival], timeout=within_s)
        return arrival.result() if arrival.done() else await self.fetch(key)

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        ours = [key for key in keys if self._exchange(key) is not None]
        if ours:
            for rank in range(self.mesh.ranks):
                if rank != self.mesh.rank:
                    self.mesh.send(rank, Kind.DELETED, buffers=["\n".join(ours).encode()])
        self._forget(ours)
        await self.inner.delete(keys)

    def _on_object(self, rank: int, head: Head, body: memoryview) -> None:
        key = head.extra.decode()
        self._arrived[key] = body
        for arrival in self._waiting.get(key, ()):
            if not arrival.done():
                arrival.set_result(body)

    def _on_deleted(self, rank: int, head: Head, body: memoryview) -> None:
        self._forget(bytes(body).decode().split("\n"))

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._arrived.pop(key, None)
