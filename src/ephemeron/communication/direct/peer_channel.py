"""A run's channel whose exchange objects are in the members' memory.

    put     kept here, and pushed to the members that read it
    get     waits for its arrival; what is late is asked for
    fetch   here, else a member that holds it
    delete  here and at all members
    all other keys: the run's store

What a lost connection has lost is found again: when two members connect, each asks the other which objects it holds. What a
dead member had sent to some and not to others, these ask each other for. Where a pair has no route, its objects are put
into the store, and read from there.

Each key has one writer at a time. What a member fetches is up to date with all messages that have arrived there: the contract
of channels holds between members whose messages are not on their way any more.

An object lives as long as one member that holds it. Replaying a run from a checkpoint needs no more: contributions are kept by
their sender and their reader, merged shards by all.

A run's channel whose exchange objects are in the store, and are sent to their readers as well.

For policies under which ranks run ahead of each other (SSP, ASP, HSP): a function that hands off has contributions that others have not used yet,
and all may hand off at once, so members' memory is no place for them. Everything is as durable as in the store; what is read
has usually arrived before it is asked for, which saves its request and its latency.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from ephemeron.communication.channels.base import GROWTH, LEAST_STEP_S, Buffer, Channel, Received, Traits, Wrapper
from ephemeron.communication.direct.connection import LinkFailed
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.errors import ChannelTimeout, KeyExists

_log = logging.getLogger(__name__)

ASK_AFTER_S = 1.0
"""Seconds of waiting after which all members are asked for an object."""
STORE_AFTER_S = 1.0
"""Seconds without a route after which objects of a pair go through the store."""
ANSWER_TIMEOUT_S = 5.0
LATENCY_S = 0.0002
_GET, _INDEX, _WANT = 0, 1, 2
_PUT, _FOUND = 0, 1
"""Whether an object comes from its put, which replaces an earlier one, or because it was asked for."""


class Exchange(NamedTuple):
    """Who takes part in the exchange of one object."""

    sender: int | None
    """Rank that puts it; None: any."""
    readers: Sequence[int] | None
    """Ranks to which it is pushed; None: those that ask for it."""


class PeerChannel(Wrapper):
    """See the module. Closing it does not close mesh and store.

    Args:
        store: the run's channel.
        mesh: of this member.
        exchange: who exchanges the object of a key; None: it belongs into the store.
        drops: injected faults: whether to lose the put of a key.
    """

    def __init__(
        self, store: Channel, mesh: Mesh, exchange: Callable[[str], Exchange | None], *, drops: Callable[[str], bool] = lambda key: False
    ) -> None:
        super().__init__(store)
        self._drops = drops
        self.mesh, self._exchange = mesh, exchange
        self.traits = Traits(service=store.traits.service, waits=True, shared=store.traits.shared, latency_s=LATENCY_S)
        self._objects: dict[str, memoryview] = {}
        self._arrivals: dict[str, list[asyncio.Future[memoryview]]] = {}
        self._elsewhere: dict[str, int] = {}
        """Objects that another member held when it connected."""
        self._wanted: dict[str, set[int]] = {}
        """Ranks that wait for an object which is not here."""
        self._unsent: dict[int, dict[str, None]] = {r: {} for r in range(mesh.ranks)}
        """Objects for ranks to which there is no route."""
        self._undeleted: dict[int, dict[str, None]] = {r: {} for r in range(mesh.ranks)}
        """Keys that such ranks may forget."""
        self._stored: set[str] = set()
        """Objects that this member has put into the store."""
        self._indexes: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        mesh.on_connect.append(self._connected)
        mesh.handle(Kind.OBJECT, self._arrived)
        mesh.handle(Kind.DELETED, self._deleted)
        mesh.handle(Kind.LOOKUP, self._wants)
        mesh.answer(Kind.LOOKUP, self._answer)
        for rank in range(mesh.ranks):
            if rank != mesh.rank and mesh.connected(rank):
                self._connected(rank, mesh.attempt_of(rank))

    async def leave(self) -> None:
        """Ends what goes on in the background, before the mesh is closed."""
        for task in [*self._tasks, *self._indexes.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._indexes.values(), return_exceptions=True)

    # -- the port -----------------------------------------------------------------------------------------

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        exchange = self._exchange(key)
        if exchange is None:
            return await self.inner.put(key, buffers, create=create)
        if create and (await self.fetch(key) is not None or key in self._objects):
            raise KeyExists("the key is taken", key=key)
        if self._drops(key):
            return
        data = memoryview(b"".join(buffers))  # the caller may change its memory
        readers = set(self._wanted.pop(key, ())) | set(exchange.readers or ())
        if key in self._objects:  # who has asked for it is not known any more
            readers.update(range(self.mesh.ranks))
        for rank in readers - {self.mesh.rank}:
            self._undeleted[rank].pop(key, None)
            if not self.mesh.send(rank, Kind.OBJECT, 0, _PUT, key.encode(), [data]):
                self._unsent[rank][key] = None
                self._start(self._store_later(rank, key))
        self._replace(key, data)

    async def fetch(self, key: str) -> memoryview | None:
        exchange = self._exchange(key)
        if exchange is None:
            return await self.inner.fetch(key)
        if self._indexes:
            await asyncio.wait(list(self._indexes.values()))
        if key in self._objects:
            return self._objects[key]
        holder = self._elsewhere.get(key)
        if holder is not None and (data := await self._ask(holder, key)) is not None:
            return data
        if exchange.sender is not None and exchange.sender != self.mesh.rank and self.mesh.connected(exchange.sender):
            return None  # it would have been pushed
        for data in await asyncio.gather(*(self._ask(r, key) for r in self._others())):
            if data is not None:
                return data
        return await self.inner.fetch(key) if self._is_apart(exchange) else None

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        exchange = self._exchange(key)
        if exchange is None:
            return await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        if key in self._objects:
            return Received(self._objects[key], 0.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        arrival: asyncio.Future[memoryview] = loop.create_future()
        self._arrivals.setdefault(key, []).append(arrival)
        searching = loop.create_task(self._search(key, exchange))
        try:
            async with asyncio.timeout_at(max(deadline, began)):
                data = await arrival
        except TimeoutError:
            found = await self.fetch(key) if deadline <= began else None
            if found is None:
                raise ChannelTimeout(f"nothing there after {loop.time() - began:.1f} s", key=key) from None
            data = found
        finally:
            searching.cancel()
            waiting = self._arrivals.get(key, [])
            if arrival in waiting:
                waiting.remove(arrival)
            if not waiting:
                self._arrivals.pop(key, None)
        return Received(data, loop.time() - began)

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        ours = [key for key in keys if self._exchange(key) is not None]
        theirs = [key for key in keys if self._exchange(key) is None]
        if ours:
            for rank, undeleted in self._undeleted.items():
                if rank != self.mesh.rank and not self.mesh.send(rank, Kind.DELETED, buffers=["\n".join(ours).encode()]):
                    undeleted.update(dict.fromkeys(ours))
        stored = self._drop(ours)
        if theirs or stored:
            await self.inner.delete([*theirs, *stored])

    # -- finding what has not come ------------------------------------------------------------------------

    async def _search(self, key: str, exchange: Exchange) -> None:
        """Asks others for an object until it arrives."""
        if self._indexes:
            await asyncio.wait(list(self._indexes.values()))
        if key in self._elsewhere and (data := await self._ask(self._elsewhere[key], key)) is not None:
            return self._hand_out(key, data)
        pushed = exchange.readers is not None and exchange.sender is not None
        if pushed and exchange.sender is not None and self.mesh.connected(exchange.sender):
            await asyncio.sleep(ASK_AFTER_S)
        step_s, asked = LEAST_STEP_S, 0.0
        loop = asyncio.get_running_loop()
        while True:
            if not asked or loop.time() - asked > ASK_AFTER_S:
                for rank in self._others():
                    self.mesh.send(rank, Kind.LOOKUP, _WANT, extra=key.encode())
                asked = loop.time()
            if self._is_apart(exchange) and (data := await self.inner.fetch(key)) is not None:
                return self._wake(key, data)
            await asyncio.sleep(step_s if self._is_apart(exchange) else ASK_AFTER_S)
            step_s = min(step_s * GROWTH, 0.25)

    def _is_apart(self, exchange: Exchange) -> bool:
        """Whether an object may be in the store, because there is no route from its sender."""
        if exchange.sender is None:
            return len(self._others()) < self.mesh.ranks - 1
        return not self.mesh.connected(exchange.sender)

    async def _ask(self, rank: int, key: str) -> memoryview | None:
        try:
            answer = await self.mesh.request(rank, Kind.LOOKUP, key.encode(), number=_GET, timeout_s=ANSWER_TIMEOUT_S)
        except LinkFailed as e:
            _log.debug("%s", e)
            return None
        return self._keep(key, answer[1:]) if answer[0] else None

    async def _index(self, rank: int, prefix: str) -> list[str]:
        try:
            answer = await self.mesh.request(rank, Kind.LOOKUP, prefix.encode(), number=_INDEX, timeout_s=ANSWER_TIMEOUT_S)
        except LinkFailed as e:
            _log.debug("%s", e)
            return []
        return bytes(answer).decode().split("\n") if answer else []

    async def _answer(self, rank: int, head: Head, body: memoryview) -> Sequence[Buffer]:
        if head.number == _INDEX:
            prefix = head.extra.decode()
            return ["\n".join(key for key in self._objects if key.startswith(prefix)).encode()]
        data = self._objects.get(head.extra.decode())
        return [b"\0"] if data is None else [b"\1", data]

    def _wants(self, rank: int, head: Head, body: memoryview) -> None:
        key = head.extra.decode()
        data = self._objects.get(key)
        if data is None:
            self._wanted.setdefault(key, set()).add(rank)
        else:
            self.mesh.send(rank, Kind.OBJECT, 0, _FOUND, head.extra, [data])

    # -- arrivals, connections ----------------------------------------------------------------------------

    def _arrived(self, rank: int, head: Head, body: memoryview) -> None:
        key = head.extra.decode()
        if head.part == _PUT:
            self._replace(key, body)
        else:
            self._hand_out(key, body)

    def _replace(self, key: str, data: memoryview) -> None:
        self._elsewhere.pop(key, None)
        self._objects[key] = data
        self._wake(key, data)

    def _hand_out(self, key: str, data: memoryview) -> None:
        self._wake(key, self._keep(key, data))

    def _wake(self, key: str, data: memoryview) -> None:
        for arrival in self._arrivals.pop(key, ()):
            if not arrival.done():
                arrival.set_result(data)

    def _keep(self, key: str, data: memoryview) -> memoryview:
        self._elsewhere.pop(key, None)
        return self._objects.setdefault(key, data)

    def _deleted(self, rank: int, head: Head, body: memoryview) -> None:
        stored = self._drop(bytes(body).decode().split("\n"))
        if stored:
            self._start(self.inner.delete(stored))

    def _drop(self, keys: Iterable[str]) -> list[str]:
        """Forgets objects, and returns those that this member has put into the store."""
        gone = []
        for key in keys:
            self._objects.pop(key, None)
            self._elsewhere.pop(key, None)
            self._wanted.pop(key, None)
            for unsent in self._unsent.values():
                unsent.pop(key, None)
            if key in self._stored:
                self._stored.discard(key)
                gone.append(key)
        return gone

    def _connected(self, rank: int, attempt: int) -> None:
        unsent, self._unsent[rank] = self._unsent[rank], {}
        undeleted, self._undeleted[rank] = self._undeleted[rank], {}
        if undeleted:
            self.mesh.send(rank, Kind.DELETED, buffers=["\n".join(undeleted).encode()])
        for key in unsent:
            self.mesh.send(rank, Kind.OBJECT, 0, _PUT, key.encode(), [self._objects[key]])
        for key in self._arrivals:
            self.mesh.send(rank, Kind.LOOKUP, _WANT, extra=key.encode())
        before = self._indexes.pop(rank, None)
        if before is not None:
            before.cancel()
        self._indexes[rank] = task = asyncio.get_running_loop().create_task(self._take_index(rank))
        task.add_done_callback(lambda done: self._indexes.pop(rank, None) if self._indexes.get(rank) is done else None)

    async def _take_index(self, rank: int) -> None:
        for key in await self._index(rank, ""):
            if key not in self._objects:
                self._elsewhere[key] = rank

    async def _store_later(self, rank: int, key: str) -> None:
        await asyncio.sleep(STORE_AFTER_S)
        if key in self._unsent[rank]:
            self._stored.add(key)
            await self.inner.put(key, [self._objects[key]])

    def _others(self) -> list[int]:
        return [r for r in range(self.mesh.ranks) if r != self.mesh.rank and self.mesh.connected(r)]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def exists(self, key: str) -> bool:
        return key in await self.list(key)  # the object may be a peer's alone

    async def list(self, prefix: str) -> list[str]:
        found = set(await self.inner.list(prefix)) | {key for key in self._objects if key.startswith(prefix)}
        for keys in await asyncio.gather(*(self._index(r, prefix) for r in self._others())):
            found.update(keys)
        return sorted(found)


# -- A run's channel whose exchange objects are in the store ------------------------------------------------------


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
