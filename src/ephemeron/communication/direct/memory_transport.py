"""Connections within one event loop, with latency, bandwidth and partitions: for the simulator and for tests.

A message arrives after the latency and its transfer, in order. A pair that is partitioned cannot connect; connections it
had either fail at once or, where the partition is silent, stay: what is sent arrives when the partition ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import Connection, ConnectionHandler, LinkFailed
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.message import HEAD_BYTES, Head
from ephemeron.communication.direct.transport import Accepted, Transport
from ephemeron.units import MB


class MemoryNetwork:
    """What connects the members in one event loop.

    Args:
        latency_s: seconds from sending to arrival.
        bandwidth_mb_s: MB (1e6 bytes) per second of one member's sending direction; None: not limited.
        setup_s: seconds to connect two members, beside the turns of their greeting.
        fails: whether two ranks can never connect.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        bandwidth_mb_s: float | None = None,
        setup_s: float = 0.0,
        fails: Callable[[frozenset[int]], bool] = lambda ranks: False,
    ) -> None:
        self.latency_s, self.bandwidth_mb_s, self.setup_s = latency_s, bandwidth_mb_s, setup_s
        self._fails = fails
        self.listening: dict[str, MemoryTransport] = {}
        self.connections: set[MemoryConnection] = set()
        self._numbers = itertools.count()
        self._cut: dict[frozenset[int], bool] = {}

    def transport(self, rank: int, name: str = "simulated") -> MemoryTransport:
        """The transport of one member."""
        return MemoryTransport(self, rank, f"memory-{next(self._numbers)}", name)

    def partition(self, a: int, b: int, *, silent: bool = False) -> None:
        """From now on two ranks cannot talk to each other.

        Args:
            a, b: ranks.
            silent: connections stay, and what is sent arrives when the partition ends; otherwise they are reset.
        """
        self._cut[frozenset((a, b))] = silent
        for connection in list(self.connections):
            if connection.ranks == frozenset((a, b)) and not silent:
                connection.reset("partitioned")

    def heal(self, a: int, b: int) -> None:
        """Ends a partition."""
        self._cut.pop(frozenset((a, b)), None)
        for connection in [c for c in self.connections if c.ranks == frozenset((a, b))]:
            connection.release()

    def is_cut(self, ranks: frozenset[int]) -> bool:
        """Whether two ranks are partitioned."""
        return ranks in self._cut

    def can_connect(self, ranks: frozenset[int]) -> bool:
        """Whether two ranks can connect now."""
        return not (self.is_cut(ranks) or self._fails(ranks))


class MemoryTransport(Transport):
    """One member's end of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, rank: int, address: str, name: str) -> None:
        self.network, self.rank, self.address, self.name = network, rank, address, name
        self.token = ""
        self.accepted: Accepted | None = None
        self.free_at = 0.0
        """Loop time from which on this member's link is free to send."""
        self.open: set[MemoryConnection] = set()

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        self.token, self.accepted = token, accepted
        self.network.listening[self.address] = self
        return self.address

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        await asyncio.sleep(self.network.setup_s + 3 * self.network.latency_s)  # the connection, and two turns of the proof
        other = self.network.listening.get(address)
        if other is None or other.accepted is None:
            raise LinkFailed(f"nothing listens at {address}")
        if not self.network.can_connect(frozenset((self.rank, other.rank))):
            await asyncio.sleep(timeout_s)
            raise LinkFailed(f"no answer from {address}")
        if other.token != token:
            raise LinkFailed(f"{address} does not know our token")
        mine, theirs = MemoryConnection(self, other, dialled=True), MemoryConnection(other, self, dialled=False)
        mine.other, theirs.other = theirs, mine
        other.accepted(theirs)
        return mine

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        return self.name in theirs.addresses

    async def close(self) -> None:
        self.network.listening.pop(self.address, None)
        self.accepted = None

    def abandon(self) -> None:
        """Ends all connections as the death of this member does."""
        self.network.listening.pop(self.address, None)
        self.accepted = None
        for connection in list(self.open):
            connection.close()


class MemoryConnection(Connection):
    """One end."""

    def __init__(self, own: MemoryTransport, theirs: MemoryTransport, *, dialled: bool) -> None:
        self._network, self._own, self.transport = own.network, own, own.name
        self.ranks = frozenset((own.rank, theirs.rank))
        self.dialled = dialled
        self.other: MemoryConnection | None = None
        self._handler: ConnectionHandler | None = None
        self._early: list[tuple[Head, bytes]] = []
        self._late: list[tuple[Head, bytes]] = []
        self._closed = False
        self._arrives_at = 0.0
        self.last_received = asyncio.get_running_loop().time()
        self._network.connections.add(self)
        own.open.add(self)

    def start(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        early, self._early = self._early, []
        for head, body in early:
            self.deliver(head, body)

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        if self._closed or self.other is None:
            return
        loop = asyncio.get_running_loop()
        body = b"".join(memoryview(b).cast("B") for b in buffers)  # a copy: the sender may be killed, or change its memory
        nbytes = HEAD_BYTES + len(head.extra) + len(body)
        self.sent_bytes += nbytes
        began = max(loop.time(), self._own.free_at)
        if self._network.bandwidth_mb_s:
            self._own.free_at = began + nbytes / (self._network.bandwidth_mb_s * MB)
            began = self._own.free_at
        self._arrives_at = max(self._arrives_at, began + self._network.latency_s)
        loop.call_at(self._arrives_at, self.other.deliver, head, body)

    def deliver(self, head: Head, body: bytes) -> None:
        """A message has arrived, unless the pair is partitioned."""
        if self._closed:
            return
        if self._network.is_cut(self.ranks):
            self._late.append((head, body))
            return
        if self._handler is None:
            self._early.append((head, body))
            return
        self.received_bytes += HEAD_BYTES + len(head.extra) + len(body)
        self.last_received = asyncio.get_running_loop().time()
        place = self._handler.allocate(self, head, len(body)) if body else None
        if place is not None and place.nbytes == len(body):
            place = place.cast("B")
            place[:] = body
        else:
            place = memoryview(bytearray(body))
        with contextlib.suppress(asyncio.CancelledError):  # an injected death ends the receiver here
            self._handler.on_message(self, head, place)

    def release(self) -> None:
        """A partition has ended."""
        late, self._late = self._late, []
        for head, body in late:
            self.deliver(head, body)

    async def drained(self) -> None:
        await asyncio.sleep(max(0.0, self._own.free_at - asyncio.get_running_loop().time()))

    def close(self) -> None:
        if self._closed:
            return
        self._leave()
        if self.other is not None and not self._network.is_cut(self.ranks):
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._arrives_at, loop.time() + self._network.latency_s), self.other.ended)

    def ended(self) -> None:
        """The other end has closed."""
        if not self._closed:
            self._leave()
            if self._handler is not None:
                self._handler.on_closed(self, "the other end closed the connection")

    def reset(self, why: str) -> None:
        """The network breaks the connection."""
        if not self._closed:
            self._leave()
            if self._handler is not None:
                asyncio.get_running_loop().call_soon(self._handler.on_closed, self, why)

    def _leave(self) -> None:
        self._closed = True
        self._network.connections.discard(self)
        self._own.open.discard(self)
