"""How a member connects to another one: dialling until a transport works, and the first messages on a connection."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ephemeron.communication.direct.connection import Connection, ConnectionHandler, LinkFailed
from ephemeron.communication.direct.endpoint import Endpoint, machine
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.direct.transport import PROOF_TIMEOUT_S, Transport
from ephemeron.communication.direct.upgrades import DialHistory, Upgrades

_log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 2.0
FIRST_AGAIN_S, MOST_AGAIN_S = 0.2, 5.0
"""Pauses between attempts to connect a pair."""
_SETTLED_S = 1.0
"""Age from which on a second connection of a pair replaces the first one, which its other end must have lost."""
_ANSWERED_S = 0.02
WAITS = 1
"""Number of the first message of a successor that is no member yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class Successor:
    """A connected next attempt of another rank, which is no member yet."""

    attempt: int
    connection: Connection
    endpoint: Endpoint | None


@dataclasses.dataclass(slots=True)
class Peer:
    """What is known of another rank."""

    attempt: int = -1
    endpoint: Endpoint | None = None
    connection: Connection | None = None
    since: float = 0.0
    """Loop time at which the connection was made."""
    links: dict[int, int] = dataclasses.field(default_factory=dict)
    """Ranks that it is connected to, and their attempts."""
    told: int | None = None
    """Attempt for which `on_connect` was called last; None: there was no route since."""
    dialling: asyncio.Task[None] | None = None
    successor: Successor | None = None
    refuses: bool = False
    """Whether dialling it has failed since the last connection was lost."""
    gone: bool = False
    """See `Mesh.is_gone`."""


class Connecting(ConnectionHandler, ABC):
    """Part of a `Mesh`: see there for the arguments."""

    def __init__(self, *, rank: int, attempt: int, ranks: int, token: str, transports: Sequence[Transport]) -> None:
        self.rank, self.attempt, self.ranks = rank, attempt, ranks
        self.on_successor: Callable[[Connection, int], None] | None = None
        """Takes the connection of a later attempt of this rank, which is no member yet, and its number."""
        self.superseded = False
        """Whether a member has refused this one because it knows a newer attempt of its rank."""
        self._token = token
        self._transports = {t.name: t for t in transports}
        self._dials = DialHistory(list(self._transports))
        self._endpoint = Endpoint(rank=rank, attempt=attempt, machine=machine())
        self._peers = {r: Peer() for r in range(ranks) if r != rank}
        self._pending: dict[Connection, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = self._waits = False
        self._ended_sent = self._ended_received = 0

    @property
    @abstractmethod
    def upgrades(self) -> Upgrades:
        """Attempts to change to better connections."""

    @abstractmethod
    def tell_links(self) -> None:
        """Tells the others to whom this member is connected."""

    @abstractmethod
    def update_routes(self) -> None:
        """Tells of members to which there is a route now, and of those to which there is none any more."""

    def start(self, work: Any) -> asyncio.Task[Any]:
        """Runs something beside everything else until the mesh is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _dial(self, rank: int, peer: Peer) -> None:
        if peer.dialling is None or peer.dialling.done():
            peer.dialling = self.start(self._dial_until_connected(rank, peer))

    async def _dial_until_connected(self, rank: int, peer: Peer) -> None:
        pause_s = FIRST_AGAIN_S
        while not (self.superseded or peer.connection) and (endpoint := peer.endpoint) is not None:
            if endpoint.attempt < peer.attempt:  # a newer one will dial
                return
            await self._dial_once(rank, endpoint)
            peer.refuses = peer.connection is None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_AGAIN_S)

    async def _dial_once(self, rank: int, endpoint: Endpoint) -> None:
        """Tries each transport until one connects, and waits until the other end has answered."""
        for name in self._dials.order(endpoint.machine):
            transport, began = self._transports[name], asyncio.get_running_loop().time()
            if not transport.reaches(self._endpoint, endpoint):
                continue
            try:
                connection = await self.dial(name, endpoint)
            except LinkFailed as e:
                _log.debug("rank %d to rank %d: %s", self.rank, rank, e)
                self._dials.failed(name, endpoint.machine)
                continue
            self._dials.connected(name, endpoint.machine, asyncio.get_running_loop().time() - began)
            self._accepted(connection)
            # A second one would take its place before the other end has answered.
            while connection in self._pending:  # noqa: ASYNC110
                await asyncio.sleep(_ANSWERED_S)
            return

    async def dial(self, transport: str, endpoint: Endpoint) -> Connection:
        """A connection to a member, proved, on which nothing was said yet.

        Raises:
            LinkFailed: there is none in time.
        """
        return await self._transports[transport].dial(endpoint.addresses[transport], self._token, timeout_s=DIAL_TIMEOUT_S)

    def _accepted(self, connection: Connection) -> None:
        """The end that has dialled says who it is, then the other one."""
        if self._closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._pending[connection] = loop.call_later(PROOF_TIMEOUT_S, self._give_up, connection)
        connection.start(self)
        if connection.dialled:
            self._say_hello(connection)

    def _give_up(self, connection: Connection) -> None:
        if self._pending.pop(connection, None) is not None:
            connection.close()

    def _say_hello(self, connection: Connection) -> None:
        connection.send(self._head(Kind.HELLO, 0, WAITS if self._waits else 0, extra=self._endpoint.to_bytes()))

    def _head(self, kind: int, target: int, number: int = 0, part: int = 0, extra: bytes = b"") -> Head:
        return Head(kind, self.rank, target, number, part, extra, self.attempt)

    def _welcome(self, connection: Connection, head: Head) -> None:
        """The first message of a connection: who is at its other end."""
        handle = self._pending.pop(connection)
        handle.cancel()
        rank, attempt = head.sender, head.attempt
        if head.kind == Kind.REFUSED:
            self.superseded = True
        if head.kind == Kind.SUCCESSOR and rank == self.rank and attempt > self.attempt and self.on_successor is not None:
            self.on_successor(connection, attempt)
            return
        peer = self._peers.get(rank)
        if head.kind == Kind.UPGRADE and peer is not None:
            self.upgrades.offered(connection, head)
            return
        if head.kind != Kind.HELLO or peer is None or attempt < peer.attempt:
            if head.kind == Kind.HELLO:
                connection.send(self._head(Kind.REFUSED, rank))
            connection.close()
            return
        waits = head.number == WAITS
        if waits and attempt == peer.attempt:  # it has become a member meanwhile, over another connection
            connection.close()
            return
        endpoint = Endpoint.of(head.extra, where=f"endpoint of rank {rank}")
        now, known = asyncio.get_running_loop().time(), peer.successor
        if waits:
            before = None if known is None else known.connection
            at_once = known is not None and known.attempt == attempt
        else:
            before, at_once = peer.connection, attempt == peer.attempt and now - peer.since < _SETTLED_S
        if before is not None and at_once and before.dialled != connection.dialled and before.dialled == (self.rank < rank):
            # Both have dialled at once: both ends keep the connection that the lower rank has dialled.
            self._retire(connection)
            return
        if not connection.dialled:
            self._say_hello(connection)
        if waits:
            if before is not None:
                self._retire(before)
            peer.successor = Successor(attempt, connection, endpoint)
        else:
            self._take(peer, attempt, connection, endpoint)

    def _take(self, peer: Peer, attempt: int, connection: Connection, endpoint: Endpoint | None) -> None:
        """From now on this is the connection to a rank, and this the attempt that is accepted."""
        peer.endpoint = endpoint or peer.endpoint
        if peer.connection is not None:
            self._retire(peer.connection)
        if attempt > peer.attempt:
            peer.links.clear()
        peer.attempt, peer.connection, peer.since = attempt, connection, asyncio.get_running_loop().time()
        peer.told, peer.refuses, peer.gone = None, False, False
        self.tell_links()
        self.update_routes()

    def _retire(self, connection: Connection) -> None:
        self.upgrades.retired(connection)
        self.count(connection)
        connection.close()

    def count(self, connection: Connection) -> None:
        """Adds the bytes of a connection that ends to those of the mesh."""
        self._ended_sent += connection.sent_bytes
        self._ended_received += connection.received_bytes

    def _connections(self) -> list[Connection]:
        return [*(p.connection for p in self._peers.values() if p.connection is not None), *self.upgrades.old]

    def _successors(self) -> list[Connection]:
        return [peer.successor.connection for peer in self._peers.values() if peer.successor is not None]
