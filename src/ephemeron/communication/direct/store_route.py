"""The last route: messages of two members that cannot connect and have no third one between them, as objects in the run's store.

    RUN/mail/GENERATION/FROM.ATTEMPT-TO.ATTEMPT/NUMBER        one or more messages, read in order and deleted by the reader

Both members open it when they have had no other route for `STORE_AFTER_S`. It counts as a route once something was received:
the store does not tell whether the other one lives. An object costs a put, a read, a deletion and polls meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from ephemeron.communication.channels.base import GROWTH, Buffer, Channel
from ephemeron.communication.direct.connection import Connection, ConnectionHandler
from ephemeron.communication.direct.message import HEAD_BYTES, Head, Kind, pack_head, unpack_head
from ephemeron.communication.keys import Keys
from ephemeron.errors import EphemeronError

_log = logging.getLogger(__name__)

STORE_AFTER_S = 1.0
"""Seconds without another route after which messages of a pair go through the store."""
MOST_PAUSE_S = 5.0
"""Between two looks at who has announced itself."""
_FIRST_POLL_S, _MOST_POLL_S, _MOST_UNHEARD_S = 0.01, 0.25, 2.0


class Member(ConnectionHandler, Protocol):
    """The mesh, as the routes see it."""

    rank: int
    attempt: int

    def apart(self) -> list[int]:
        """Ranks to which there is no other route."""

    def attempt_of(self, rank: int) -> int:
        """Highest attempt of a rank that was seen."""

    def heard(self, rank: int, attempt: int) -> None:
        """There is a route to this attempt of a rank."""

    def update_routes(self) -> None:
        """A route may have ended."""


class StoreRoutes:
    """Routes of one member through the store.

    Args:
        member: the mesh.
        store: of the run.
        keys: of the run and generation.
        silence_s: without a message, after which a route is given up.
    """

    def __init__(self, member: Member, store: Channel, keys: Keys, *, silence_s: float) -> None:
        self._member, self._store, self._keys, self._silence_s = member, store, keys, silence_s
        self._routes: dict[int, StoreRoute] = {}

    def route(self, rank: int) -> StoreRoute | None:
        """The route to a rank from which something was heard lately."""
        route = self._routes.get(rank)
        return route if route is not None and route.heard and route.attempt >= self._member.attempt_of(rank) else None

    async def run(self) -> None:
        """Opens routes to ranks that have no other, and closes those that are not needed any more."""
        pause_s, before = STORE_AFTER_S, set[int]()
        while True:
            await asyncio.sleep(pause_s)
            apart = set(self._member.apart())
            pause_s = min(2 * pause_s, MOST_PAUSE_S) if apart and apart <= before else STORE_AFTER_S
            for rank in self._routes.keys() - apart:
                self._routes[rank].close()
            if apart & before:
                await self._open(apart & before)
            before = apart
            self._member.update_routes()

    async def _open(self, ranks: set[int]) -> None:
        try:
            names = await self._store.list(self._keys.peers)
        except EphemeronError as e:
            _log.debug("rank %d: %s", self._member.rank, e)
            return
        for name in names:
            rank, attempt = map(int, name.rpartition("/")[2].split("."))
            known = self._routes.get(rank)
            if rank not in ranks or attempt < self._member.attempt_of(rank) or (known and attempt < known.attempt):
                continue
            if known is None or attempt > known.attempt:
                if known is not None:
                    known.close()
                known = self._routes[rank] = self._made(rank, attempt)
            known.start(self._member)

    def _made(self, rank: int, attempt: int) -> StoreRoute:
        own, theirs = f"{self._member.rank}.{self._member.attempt}", f"{rank}.{attempt}"
        hello = Head(Kind.PING, self._member.rank, rank, attempt=self._member.attempt)
        mail = self._keys.mail
        return StoreRoute(
            self._store,
            attempt,
            mail(own, theirs),
            mail(theirs, own),
            hello=hello,
            silence_s=self._silence_s,
            told=lambda: self._member.heard(rank, attempt),
        )

    async def drained(self) -> None:
        """Waits until what was sent is stored."""
        for route in self._routes.values():
            await route.drained()

    def close(self) -> None:
        """Ends all routes."""
        for route in self._routes.values():
            route.close()


class StoreRoute(Connection):
    """Messages between two attempts. Can be closed and started again, and goes on where it was.

    Args:
        store: of the run.
        attempt: of the other end.
        sends, receives: prefixes of the objects in each direction.
        hello: message that says that this end is there.
        silence_s: see `StoreRoutes`.
        told: called when the other end is heard for the first time, or again.
    """

    transport = "store"
    dialled = False

    def __init__(
        self, store: Channel, attempt: int, sends: str, receives: str, *, hello: Head, silence_s: float, told: Callable[[], None]
    ) -> None:
        self.attempt = attempt
        self._store, self._sends, self._receives = store, sends, receives
        self._hello, self._silence_s, self._told = hello, silence_s, told
        self._stored = self._read = 0
        """Numbers of the next objects."""
        self._out: list[bytes] = []
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._handler: ConnectionHandler | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def heard(self) -> bool:
        """Whether the other end was there lately, and this end listens."""
        now = asyncio.get_running_loop().time()
        return bool(self._tasks) and self.last_received > 0 and now - self.last_received < self._silence_s

    def start(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        if not self._tasks:
            for work in (self._put_all(), self._take_all(), self._keep_alive()):
                self._start(work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(work))

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        if not self._tasks:
            return
        body = b"".join(memoryview(b).cast("B") for b in buffers)
        self._out.append(pack_head(head, nbytes=len(body)) + body)
        self._empty.clear()
        self._wake.set()

    async def drained(self) -> None:
        if self._tasks:
            await self._empty.wait()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._out.clear()
        self._empty.set()
        self.last_received = 0.0

    async def _put_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            data, self._out = self._out, []
            number, self._stored = self._stored, self._stored + 1
            await self._repeated(lambda: self._store.put(f"{self._sends}{number}", data))  # noqa: B023 - awaited here
            if not self._out:
                self._empty.set()

    async def _take_all(self) -> None:
        pause_s = _FIRST_POLL_S
        while True:
            key = f"{self._receives}{self._read}"
            data = await self._repeated(lambda: self._store.fetch(key))  # noqa: B023 - awaited here
            if data is None:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * GROWTH, _MOST_POLL_S if self.heard else _MOST_UNHEARD_S)
                continue
            self._read, pause_s, new = self._read + 1, _FIRST_POLL_S, not self.heard
            self.last_received = asyncio.get_running_loop().time()
            if new:
                self._told()
            self._take(data)
            await self._repeated(lambda: self._store.delete([key]))  # noqa: B023 - awaited here

    def _take(self, data: memoryview) -> None:
        while data.nbytes:
            incoming = unpack_head(data[:HEAD_BYTES])
            begin = HEAD_BYTES + incoming.extra_bytes
            head = incoming.head._replace(extra=bytes(data[HEAD_BYTES:begin]))
            body, data = bytearray(data[begin : begin + incoming.nbytes]), data[begin + incoming.nbytes :]
            if self._handler is not None:
                self._handler.on_message(self, head, memoryview(body))

    async def _keep_alive(self) -> None:
        while True:
            self.send(self._hello)
            await asyncio.sleep(self._silence_s / 4)
            if not self.heard:
                await asyncio.sleep(0.75 * self._silence_s)

    async def _repeated(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        while True:
            with contextlib.suppress(EphemeronError):
                return await request()
            await asyncio.sleep(_MOST_UNHEARD_S)
