"""The mesh: one member's connections to all other members of a generation.

A member listens, announces where (`RUN/peer/GENERATION/RANK.ATTEMPT` in the run's store), lists those who were there before it,
and dials them; members that come later dial it. So nothing is ever polled: a start costs each function one put and one
listing, and a replacement dials everybody.

A successor connects before it is a member: it announces itself apart (`RUN/waiting/…`), and what is sent goes to its
predecessor until it says on its connections that it is a member (`become_member`).

Fencing: of each rank a member accepts the highest attempt that it has seen. When a newer attempt proves itself the older
one's connection is closed; what a frozen function sends after its replacement has come never arrives.

Routes: a connection of the pair's own; where the two cannot connect, through a third member that is connected to both
(members tell each other whom they are connected to); else through the store (`store_route`). Failed pairs are tried
again in the background, pairs with a poor connection change to a better one (`upgrades`), and a connection that is silent although it was asked for an answer is given up.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.direct.connecting import Connecting, Peer, Successor
from ephemeron.communication.direct.connection import Connection, LinkFailed
from ephemeron.communication.direct.endpoint import Endpoint, announce, announce_waiting
from ephemeron.communication.direct.message import FORWARDED, Head, Kind
from ephemeron.communication.direct.store_route import StoreRoutes
from ephemeron.communication.direct.transport import Transport
from ephemeron.communication.direct.upgrades import KINDS, Upgrades
from ephemeron.communication.keys import Keys

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)

SILENCE_S = 10.0
"""Seconds without an answer after which a connection is given up."""
GONE_S = 6.0
"""Seconds after the other end has closed a connection in which a live member would have come back, if only through the store."""
_GONE_AGAIN_S = 1.0
_LINK = struct.Struct("<HI")

OnMessage = Callable[[int, Head, memoryview], None]
"""Handler of a kind: rank of the sender, head, body."""
Allocate = Callable[[int, Head, int], "memoryview | None"]
"""Chooses memory for a body: rank of the sender, head, bytes."""


class Mesh(Connecting):
    """Connections of one member. Made with `join`.

    Args:
        rank, attempt: of this member.
        ranks: members of the generation.
        keys: of the run and generation.
        token: of the run; never stored or logged.
        transports: the preferred first.
        silence_s: see `SILENCE_S`.
    """

    def __init__(
        self, *, rank: int, attempt: int, ranks: int, keys: Keys, token: str, transports: Sequence[Transport], silence_s: float = SILENCE_S
    ) -> None:
        super().__init__(rank=rank, attempt=attempt, ranks=ranks, token=token, transports=transports)
        self.on_connect: list[Callable[[int, int], None]] = []
        """Called with rank and attempt when a route to a member appears, or a new one, on which nothing may have arrived yet."""
        self.on_lost: list[Callable[[int], None]] = []
        """Called when no route to a rank is left."""
        self.on_gone: list[Callable[[int], None]] = []
        """Called when `is_gone` becomes true for a rank."""
        self._keys, self._silence_s = keys, silence_s
        self._handlers: dict[int, tuple[OnMessage, Allocate | None]] = {}
        self._early: dict[int, list[tuple[int, Head, memoryview]]] = {}
        self._requests = Requests(self, self.start)
        self._upgrades = Upgrades(self, self._transports, self._dials)
        self._stored: StoreRoutes | None = None
        self._announcing: asyncio.Task[None] | None = None

    @property
    def upgrades(self) -> Upgrades:
        return self._upgrades

    @classmethod
    async def join(
        cls,
        *,
        store: Channel,
        rank: int,
        attempt: int,
        ranks: int,
        keys: Keys,
        token: str,
        transports: Sequence[Transport],
        silence_s: float = SILENCE_S,
        waits: bool = False,
    ) -> Mesh:
        """Announces this member and begins to connect to those that were announced before. Does not wait for connections.

        Args:
            store: of the run.
            rank, attempt, ranks, keys, token, transports, silence_s: see `Mesh`.
            waits: it is a successor, and no member before `become_member`.

        Raises:
            ChannelUnreachable: the store does not answer.
        """
        mesh = cls(rank=rank, attempt=attempt, ranks=ranks, keys=keys, token=token, transports=transports, silence_s=silence_s)
        mesh._waits = waits
        try:
            await mesh._listen()
            await (mesh._announce_waiting(store) if waits else mesh._announce(store))
        except BaseException:
            await mesh.close()
            raise
        mesh.start(mesh._watch())
        if not waits:
            mesh._use_store(store)
        return mesh

    def become_member(self, store: Channel) -> None:
        """The predecessor has ended: the others send to this attempt from now on, and accept what it sends.

        Args:
            store: of the run.
        """
        self._waits = False
        dialled = [connection for connection in self._pending if connection.dialled]
        for connection in [*dialled, *self._connections(), *self._successors()]:
            connection.send(self._head(Kind.MEMBER, 0))
        self._announcing = self.start(self._announce(store))
        self._use_store(store)
        asyncio.get_running_loop().call_soon(self.update_routes)

    def _use_store(self, store: Channel) -> None:
        self._stored = StoreRoutes(self, store, self._keys, silence_s=self._silence_s)
        self.start(self._stored.run())
        if len(self._transports) > 1:
            self.start(self.upgrades.run())

    async def _listen(self) -> None:
        for transport in self._transports.values():
            try:
                address = await transport.listen(self._token, self._accepted)
            except OSError as e:
                _log.warning("rank %d cannot listen for %s: %s", self.rank, transport.name, e)
                continue
            if address is not None:
                self._endpoint.addresses[transport.name] = address

    async def _announce(self, store: Channel) -> None:
        self._dial_all(await announce(store, self._keys, self._endpoint))

    async def _announce_waiting(self, store: Channel) -> None:
        members, waiting = await announce_waiting(store, self._keys, self._endpoint)
        self._dial_all(members)
        for rank, endpoint in waiting.items():
            if rank in self._peers:
                self.start(self._dial_once(rank, endpoint))

    def _dial_all(self, members: dict[int, Endpoint]) -> None:
        for rank, endpoint in members.items():
            peer = self._peers.get(rank)
            if peer is not None and (peer.connection is None or endpoint.attempt > peer.attempt):
                peer.endpoint = endpoint
                self._dial(rank, peer)

    # -- what callers use ---------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over all connections so far."""
        return self._ended_sent + sum(c.sent_bytes for c in self._connections())

    @property
    def received_bytes(self) -> int:
        """Bytes received over all connections so far."""
        return self._ended_received + sum(c.received_bytes for c in self._connections())

    def attempt_of(self, rank: int) -> int:
        """Highest attempt of a rank that was seen; -1: none."""
        return self.attempt if rank == self.rank else self._peers[rank].attempt

    def is_gone(self, rank: int, attempt: int) -> bool:
        """Whether an attempt of a rank seems to be dead: it has closed its connections, refuses new ones, and no member and no
        message in the store has told of it for `GONE_S`, while others are connected to this member."""
        peer = self._peers.get(rank)
        return peer is not None and peer.gone and peer.attempt == attempt and not self.connected(rank)

    def transport_of(self, rank: int) -> str:
        """Transport of the connection to a rank; where there is none, `forwarded`, `store`, or empty."""
        connection, route = self._peers[rank].connection, self._route(rank)
        if route is None or route is connection or route.transport == "store":
            return "" if route is None else route.transport
        return "forwarded"

    def connection_to(self, rank: int) -> Connection | None:
        """The connection to a rank."""
        return self._peers[rank].connection

    def endpoint_of(self, rank: int) -> Endpoint | None:
        """How a rank can be reached, if it is known."""
        return self._peers[rank].endpoint

    @property
    def endpoint(self) -> Endpoint:
        """How this member can be reached."""
        return self._endpoint

    def connected(self, rank: int) -> bool:
        """Whether there is a route to a rank."""
        return rank == self.rank or self._route(rank) is not None

    def send(self, rank: int, kind: int, number: int = 0, part: int = 0, extra: bytes = b"", buffers: Sequence[Buffer] = ()) -> bool:
        """Sends a message. Buffers must stay unchanged until `drained`; a message to a lost member is lost.

        Returns:
            False: there is no route.
        """
        route = self._route(rank)
        if route is None:
            return False
        flags = 0 if route is self._peers[rank].connection else FORWARDED
        route.send(Head(kind, self.rank, rank, number, part, extra, self.attempt, flags), buffers)
        return True

    async def drained(self) -> None:
        """Waits until all that was sent has left this process, or its connection was lost."""
        for connection in self._connections():
            await connection.drained()
        if self._stored is not None:
            await self._stored.drained()

    def handle(self, kind: int, on_message: OnMessage, allocate: Allocate | None = None) -> None:
        """Registers the handler of a kind of messages. Those that came before are delivered now."""
        self._handlers[kind] = on_message, allocate
        for rank, head, body in self._early.pop(kind, []):
            on_message(rank, head, body)

    def answer(self, kind: int, handler: Answer) -> None:
        """Registers what answers requests of a kind."""
        self._requests.answer(kind, handler)

    async def request(
        self, rank: int, kind: int, extra: bytes = b"", buffers: Sequence[Buffer] = (), *, number: int = 0, timeout_s: float
    ) -> memoryview:
        """Asks a member, and returns its answer.

        Args:
            rank: of the member.
            kind: that the member answers; see `answer`.
            extra, buffers, number: as for a message.
            timeout_s: seconds to wait.

        Raises:
            LinkFailed: no route, no answer in time, or the member does not answer this kind.
        """
        return await self._requests.ask(rank, kind, extra, buffers, number=number, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes all connections and stops listening."""
        self._closed = True
        if self._announcing is not None:  # what a cancelled put stores late, nothing deletes
            await asyncio.gather(self._announcing, return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stored is not None:
            self._stored.close()
        for connection in [*self._pending, *self._successors(), *self._connections()]:
            self.count(connection)
            connection.close()
        self.upgrades.close()
        for handle in self._pending.values():
            handle.cancel()
        self._pending.clear()
        for peer in self._peers.values():
            peer.connection = peer.successor = None
        for transport in self._transports.values():
            await transport.close()

    # -- connections of pairs -----------------------------------------------------------------------------

    def replace(self, rank: int, connection: Connection) -> None:
        """Sends over another connection to a rank from now on; what was sent over the present one arrives before."""
        self._peers[rank].connection = connection

    def lost_messages(self, rank: int, why: str) -> None:
        """Messages to or from a rank may be lost, though there is a connection."""
        self._requests.lost(rank, why)
        self._peers[rank].told = None
        self.update_routes()

    # -- routes -------------------------------------------------------------------------------------------

    def _route(self, rank: int) -> Connection | None:
        if self._waits:
            return None
        peer = self._peers[rank]
        if peer.connection is not None:
            return peer.connection
        for via in self._peers.values():
            if via.connection is not None and 0 <= peer.attempt <= via.links.get(rank, -1):
                return via.connection
        return None if self._stored is None else self._stored.route(rank)

    def apart(self) -> list[int]:
        """Ranks to which there is no connection, and no member that forwards."""
        return [r for r in self._peers if (route := self._route(r)) is None or route.transport == "store"]

    def tell_links(self) -> None:
        if self._waits:
            return
        links = b"".join(_LINK.pack(r, p.attempt) for r, p in self._peers.items() if p.connection is not None)
        for rank, peer in self._peers.items():
            if peer.connection is not None:
                peer.connection.send(self._head(Kind.LINKS, rank, extra=links))

    def update_routes(self) -> None:
        """Tells of members to which there is a route now, and of those to which there is none any more."""
        for rank, peer in self._peers.items():
            if self._route(rank) is None:
                if peer.told is not None:
                    peer.told = None
                    for lost in self.on_lost:
                        lost(rank)
            elif peer.told != peer.attempt:
                peer.told = peer.attempt
                for connected in self.on_connect:
                    connected(rank, peer.attempt)

    # -- messages -----------------------------------------------------------------------------------------

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        """See `ConnectionHandler`."""
        if head.target != self.rank or head.attempt < self._attempt(head.sender):
            return None
        _, allocate = self._handlers.get(head.kind, (None, None))
        return None if allocate is None else allocate(head.sender, head, nbytes)

    def _attempt(self, rank: int) -> int:
        peer = self._peers.get(rank)
        return -1 if peer is None else peer.attempt

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        """See `ConnectionHandler`."""
        if connection in self._pending:
            return self._welcome(connection, head)
        if head.kind in KINDS:
            return self.upgrades.take(connection, head)
        if head.kind < 32 and not head.flags & FORWARDED and head.kind not in (Kind.REQUEST, Kind.REPLY):
            return self._own_message(connection, head)
        if head.target != self.rank:
            target = self._peers.get(head.target)
            if target is not None and target.connection is not None and head.flags & FORWARDED:
                target.connection.send(head, [body])
            return
        if head.sender not in self._peers or head.attempt < self._peers[head.sender].attempt:
            return
        if head.attempt > self._peers[head.sender].attempt:
            self._newer(head.sender, head.attempt)
        if head.kind in (Kind.REQUEST, Kind.REPLY):
            self._requests.take(head, body)
        elif head.kind in self._handlers:
            self._handlers[head.kind][0](head.sender, head, body)
        else:
            self._early.setdefault(head.kind, []).append((head.sender, head, body))

    def _own_message(self, connection: Connection, head: Head) -> None:
        peer = self._peers.get(head.sender)
        if peer is not None and (successor := peer.successor) is not None and successor.connection is connection:
            return self._message_of_successor(peer, successor, head)
        if peer is None or (peer.connection is not connection and connection not in self.upgrades.old):
            return
        if head.kind == Kind.REFUSED:
            self.superseded = True
        elif head.kind == Kind.LINKS:
            peer.links = dict(_LINK.iter_unpack(head.extra))
            self.superseded |= peer.links.get(self.rank, -1) > self.attempt
            for rank, attempt in peer.links.items():
                if rank in self._peers and attempt > self._peers[rank].attempt:
                    self._newer(rank, attempt)
            self.update_routes()
        elif head.kind == Kind.PING:
            connection.send(self._head(Kind.PONG, head.sender))

    def _message_of_successor(self, peer: Peer, successor: Successor, head: Head) -> None:
        if head.kind == Kind.PING:
            successor.connection.send(self._head(Kind.PONG, head.sender))
        elif head.kind == Kind.MEMBER:
            peer.successor = None
            if successor.attempt < peer.attempt:
                successor.connection.send(self._head(Kind.REFUSED, head.sender))
                self._retire(successor.connection)
            else:
                self._take(peer, successor.attempt, successor.connection, successor.endpoint)

    def _newer(self, rank: int, attempt: int) -> None:
        """A newer attempt of a rank than the known one exists."""
        peer = self._peers[rank]
        peer.attempt, before = attempt, peer.connection
        peer.connection = None
        if before is not None:
            self._retire(before)
            self.tell_links()
        self.update_routes()

    def heard(self, rank: int, attempt: int) -> None:
        """See `store_route.Member`."""
        if attempt > self._peers[rank].attempt:
            self._newer(rank, attempt)
        else:
            self.update_routes()

    # -- losses -------------------------------------------------------------------------------------------

    def on_closed(self, connection: Connection, why: str) -> None:
        """See `ConnectionHandler`."""
        self._lost(connection, why, closed=True)

    def _lost(self, connection: Connection, why: str, *, closed: bool) -> None:
        handle = self._pending.pop(connection, None)
        if handle is not None:
            handle.cancel()
            return
        for rank, peer in self._peers.items():
            if peer.successor is not None and peer.successor.connection is connection:
                peer.successor = None
            if peer.connection is connection:
                _log.info("rank %d has lost the connection to rank %d: %s", self.rank, rank, why)
                self.upgrades.retired(connection)
                self.count(connection)
                peer.connection = None
                peer.told = None if self._route(rank) is not None else peer.told
                self._requests.lost(rank, why)
                self.tell_links()
                self.update_routes()
                if peer.endpoint is not None and not self._closed:
                    self._dial(rank, peer)
                    if closed:
                        self.start(self._until_gone(rank, peer, peer.attempt))
                return
        self.upgrades.closed(connection, why)

    async def _until_gone(self, rank: int, peer: Peer, attempt: int) -> None:
        await asyncio.sleep(GONE_S)
        while peer.attempt == attempt and not self.superseded and not self.connected(rank):
            if peer.refuses and self._connections():
                _log.info("rank %d: attempt %d of rank %d seems to be dead", self.rank, attempt, rank)
                peer.gone = True
                for gone in self.on_gone:
                    gone(rank)
                return
            await asyncio.sleep(_GONE_AGAIN_S)

    async def _watch(self) -> None:
        """Gives up connections that are silent although they were asked for an answer.

        While this process stands still itself, nothing is read: their silence counts from its end.
        """
        loop = asyncio.get_running_loop()
        heard_since = looked = loop.time()
        while True:
            await asyncio.sleep(self._silence_s / 4)
            if loop.time() - looked > self._silence_s / 2:
                heard_since = loop.time()
            looked = loop.time()
            self.update_routes()
            self.upgrades.watch(self._silence_s, heard_since)
            for rank, peer in self._peers.items():
                connection = peer.connection
                if connection is None:
                    continue
                silent_s = looked - max(connection.last_received, peer.since, heard_since)
                if silent_s > self._silence_s:
                    connection.close()
                    self._lost(connection, f"silent for {silent_s:.1f} s", closed=False)
                elif silent_s > self._silence_s / 4:
                    connection.send(self._head(Kind.PING, rank))


# -- requests between members: a question, and one answer or none -------------------------------------------------


_ASKED = struct.Struct("<q")
"""Number in the head of the inner message; before its extra bytes."""

Answer = Callable[[int, Head, memoryview], Awaitable[Sequence[Buffer]]]
"""Answers requests of a kind: rank of the asking member, head, body. `LinkFailed`: it has no answer."""


class Requests:
    """Questions of one member that are not answered yet, and its answers to others.

    Args:
        mesh: sends them.
        start: runs an answer beside everything else.
    """

    def __init__(self, mesh: Mesh, start: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._mesh, self._start = mesh, start
        self._answers: dict[int, Answer] = {}
        self._waiting: dict[int, tuple[int, asyncio.Future[memoryview]]] = {}
        """By number of the request: rank that is asked, and its answer."""
        self._last = 0

    def answer(self, kind: int, handler: Answer) -> None:
        """See `Mesh.answer`."""
        self._answers[kind] = handler

    async def ask(self, rank: int, kind: int, extra: bytes, buffers: Sequence[Buffer], *, number: int, timeout_s: float) -> memoryview:
        """See `Mesh.request`."""
        self._last += 1
        asked, answer = self._last, asyncio.get_running_loop().create_future()
        self._waiting[asked] = rank, answer
        try:
            if not self._mesh.send(rank, Kind.REQUEST, asked, kind, _ASKED.pack(number) + extra, buffers):
                raise LinkFailed(f"no route to rank {rank}")
            async with asyncio.timeout(timeout_s):
                found: memoryview = await answer
                return found
        except TimeoutError as e:
            raise LinkFailed(f"rank {rank} has not answered within {timeout_s:g} s") from e
        finally:
            del self._waiting[asked]

    def take(self, head: Head, body: memoryview) -> None:
        """Takes in a message of another member that is a request or an answer."""
        if head.kind == Kind.REQUEST:
            self._start(self._reply(head, body))
            return
        rank, answer = self._waiting.get(head.number, (-1, None))
        if answer is None or answer.done() or rank != head.sender:
            return
        if head.part:
            answer.set_result(body)
        else:
            answer.set_exception(LinkFailed(f"rank {rank} has no answer"))

    def lost(self, rank: int, why: str) -> None:
        """Fails what a rank was asked: the question, or its answer, may be lost."""
        for asked, answer in self._waiting.values():
            if asked == rank and not answer.done():
                answer.set_exception(LinkFailed(f"the connection to rank {rank} is lost: {why}"))

    async def _reply(self, head: Head, body: memoryview) -> None:
        (number,) = _ASKED.unpack_from(head.extra)
        inner = head._replace(kind=head.part, number=number, extra=head.extra[_ASKED.size :])
        handler, buffers, found = self._answers.get(head.part), list[Buffer](), 1
        try:
            if handler is None:
                raise LinkFailed(f"requests of kind {head.part} are not answered here")
            buffers = list(await handler(head.sender, inner, body))
        except LinkFailed as e:
            _log.debug("no answer to rank %d: %s", head.sender, e)
            found = 0
        self._mesh.send(head.sender, Kind.REPLY, head.number, found, b"", buffers)
