"""Injected partitions: a member that cannot reach chosen ranks for some time.

One end suffices: it closes or holds its connections to a rank, opens none, and accepts none. Others may still forward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import Connection, ConnectionHandler
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.message import FORWARDED, Head
from ephemeron.communication.direct.transport import Accepted, Transport

_WHY = "cut by an injected fault"


class Cuts:
    """Ranks that one member cannot reach, and its connections."""

    def __init__(self) -> None:
        self.silent: dict[int, bool] = {}
        """By rank that cannot be reached: whether its connections stay, and what passes over them is held back."""
        self.open: set[_Cuttable] = set()

    def around(self, transports: Sequence[Transport]) -> list[Transport]:
        """These transports, with connections that can be cut."""
        return [_CuttableTransport(t, self) for t in transports]

    def cut(self, rank: int, *, silent: bool, seconds: float) -> None:
        """Cuts the connections to a rank.

        Args:
            rank: of another member.
            silent: hold back what is sent and received, as a network does that loses all packets; otherwise, reset them.
            seconds: after which the two can reach each other again, and what was held back arrives.
        """
        self.silent[rank] = silent
        if not silent:
            for connection in [c for c in self.open if c.rank == rank]:
                connection.lose()
        asyncio.get_running_loop().call_later(seconds, self._heal, rank)

    def _heal(self, rank: int) -> None:
        self.silent.pop(rank, None)
        for connection in [c for c in self.open if c.rank == rank]:
            connection.release()


class _CuttableTransport(Transport):
    def __init__(self, inner: Transport, cuts: Cuts) -> None:
        self.name, self._inner, self._cuts = inner.name, inner, cuts

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        return await self._inner.listen(token, lambda connection: accepted(_Cuttable(connection, self._cuts)))

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        return _Cuttable(await self._inner.dial(address, token, timeout_s=timeout_s), self._cuts)

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        return theirs.rank not in self._cuts.silent and self._inner.reaches(own, theirs)

    async def close(self) -> None:
        await self._inner.close()


class _Cuttable(Connection, ConnectionHandler):
    """A connection, and the receiver of the one that it is made of."""

    def __init__(self, inner: Connection, cuts: Cuts) -> None:
        self.transport, self.dialled, self.last_received = inner.transport, inner.dialled, inner.last_received
        self.rank = -1
        """Of the other end; -1: it has not said."""
        self._inner, self._cuts = inner, cuts
        self._sent: deque[tuple[Head, bytes]] = deque()
        self._arrived: deque[tuple[Head, memoryview]] = deque()
        self._handler: ConnectionHandler | None = None
        cuts.open.add(self)

    @property
    def _held(self) -> bool:
        return self.rank in self._cuts.silent

    def start(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        self._inner.start(self)

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        if self._held:
            self._sent.append((head, b"".join(memoryview(b).cast("B") for b in buffers)))
            return
        self._inner.send(head, buffers)
        self.sent_bytes = self._inner.sent_bytes

    async def drained(self) -> None:
        await self._inner.drained()

    def close(self) -> None:
        self._cuts.open.discard(self)
        self._inner.close()

    def lose(self) -> None:
        """Resets the connection."""
        self.close()
        if self._handler is not None:
            self._handler.on_closed(self, _WHY)

    def release(self) -> None:
        """Delivers what was held back."""
        while self._sent:
            head, body = self._sent.popleft()
            self.send(head, [body])
        while self._arrived and self in self._cuts.open:
            self._deliver(*self._arrived.popleft())

    # -- what the connection below tells ------------------------------------------------------------------

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        if self._handler is None or self._held:
            return None
        return self._handler.allocate(self, head, nbytes)

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        new = self.rank < 0
        if not head.flags & FORWARDED:
            self.rank = head.sender
        if not self._held:
            self.last_received, self.received_bytes = connection.last_received, connection.received_bytes
            self._deliver(head, body)
        elif new:
            self.lose()
        else:
            self._arrived.append((head, body))

    def _deliver(self, head: Head, body: memoryview) -> None:
        if self._handler is not None:
            self._handler.on_message(self, head, body)

    def on_closed(self, connection: Connection, why: str) -> None:
        self._cuts.open.discard(self)
        if self._handler is not None:
            self._handler.on_closed(self, why)
