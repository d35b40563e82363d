"""The port of connections between two members, and connections over sockets.

A connection is ordered and reliable and carries whole messages. Bodies are sent from the caller's memory and received
into the memory that the receiver chooses once it has read the head, without a copy in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import xxhash

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.message import HEAD_BYTES, Head, Incoming, pack_head, unpack_head
from ephemeron.communication.rpc.memory import fresh_memory
from ephemeron.communication.rpc.sockets import not_in_children
from ephemeron.errors import LinkFailed as LinkFailed
from ephemeron.errors import ProtocolError

_BUFFER_BYTES = 256 << 10
_DIRECT_BYTES = 32 << 10
"""From this size on, a body is received directly into its place."""
_PEEK_BYTES = 4 << 10
_TURN_BYTES = 8 << 20
"""Bytes read before other tasks have a turn."""
_VECTOR = 64
_SOCKET_BYTES = 4 << 20
_UNANSWERED_MS = 10_000


class ConnectionHandler(Protocol):
    """Receiver of a connection's events. All methods run on the event loop and must be quick."""

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> memoryview | None:
        """Memory of `nbytes` for the body of a message; None: fresh memory."""

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        """A message has arrived."""

    def on_closed(self, connection: Connection, why: str) -> None:
        """The connection is over. Called once; not after `close`."""


class Connection(ABC):
    """One end of a connection whose other end has proved that it knows the run's token."""

    transport: str
    """`unix`, `tcp`, `punched`, `relay`, `websocket`, `simulated`."""
    dialled: bool
    """Whether this end has opened it."""
    sent_bytes = 0
    received_bytes = 0
    last_received = 0.0
    """Loop time at which bytes have arrived."""

    @abstractmethod
    def start(self, handler: ConnectionHandler) -> None:
        """Begins to deliver messages."""

    @abstractmethod
    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        """Sends a message, or queues it. Never blocks; after the connection is lost, it does nothing.

        Args:
            head: see `message`.
            buffers: the body; must stay unchanged until `drained` has returned.
        """

    @abstractmethod
    async def drained(self) -> None:
        """Waits until all bytes have been passed to the transport, or the connection is lost."""

    @abstractmethod
    def close(self) -> None:
        """Closes this end. Idempotent."""


class CommonBody(tuple[Buffer, ...]):
    """Body of a message that goes to several members: its checksum is made once. It must not change meanwhile."""

    @functools.cached_property
    def checksum(self) -> int:
        return _checksum(self)


class SocketConnection(Connection):
    """A connection over a stream socket.

    Args:
        sock: connected, non-blocking, proved; owned from now on.
        transport: see `Connection`.
        dialled: see `Connection`.
        checksums: whether bodies carry checksums: across machines.
    """

    def __init__(self, sock: socket.socket, *, transport: str, dialled: bool, checksums: bool) -> None:
        self.transport, self.dialled = transport, dialled
        self._sock, self._checksums = not_in_children(sock), checksums
        self._loop = asyncio.get_running_loop()
        self._handler: ConnectionHandler | None = None
        self._closed = False
        self._out: deque[memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0
        self._incoming: Incoming | None = None
        self._body = memoryview(b"")
        self._filled = self._summed = 0
        self._digest: xxhash.xxh3_64 | None = None
        """Checksum of the first `_summed` bytes of a large body: they are in the processor's cache when they have just arrived."""
        self.last_received = self._loop.time()
        tune(sock)

    def start(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        if not self._closed:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        if self._closed:
            return
        views = [v for v in map(bytes_of, buffers) if v.nbytes]
        nbytes = sum(v.nbytes for v in views)
        checksum = 0
        if self._checksums and views:
            checksum = buffers.checksum if isinstance(buffers, CommonBody) else _checksum(views)
        packed = pack_head(head, nbytes=nbytes, checksum=checksum)
        self.sent_bytes += nbytes
        self._queue(packed, views)

    def _queue(self, packed: bytes, views: list[memoryview]) -> None:
        self.sent_bytes += len(packed)
        if self._out:
            self._out.append(memoryview(packed))
            self._out.extend(views)
            return
        self._out.append(memoryview(packed))
        self._out.extend(views)
        self._write()
        if self._out and not self._closed:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _write(self) -> None:
        """Writes until the socket takes no more."""
        out = self._out
        while out:
            try:
                sent = self._sock.sendmsg([out[i] for i in range(min(len(out), _VECTOR))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                self._fail(str(e))
                return
            while sent:
                first = out[0]
                if sent < first.nbytes:
                    out[0] = first[sent:]
                    break
                sent -= first.nbytes
                out.popleft()

    def _writable(self) -> None:
        self._write()
        if not self._out and not self._closed:
            self._loop.remove_writer(self._sock.fileno())
            self._release()

    def _release(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    async def drained(self) -> None:
        if self._out and not self._closed:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    # -- receiving ----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        turn, peeks = 0, False
        """A large body has just arrived: another one may follow, little of which is to be copied out of the buffer."""
        try:
            while turn < _TURN_BYTES and not self._closed:
                waits = self._body.nbytes - self._filled if self._incoming is not None else 0
                direct = waits >= _DIRECT_BYTES and self._begin == self._end
                place = self._body[self._filled :] if direct else self._room()
                if peeks:
                    place = place[:_PEEK_BYTES]
                got = self._sock.recv_into(place)
                if not got:
                    return self._fail("the other end closed the connection")
                turn += got
                self.received_bytes += got
                if direct:
                    self._filled += got
                    if self._digest is not None:
                        self._digest.update(self._body[self._summed : self._filled])
                        self._summed = self._filled
                    if self._filled == self._body.nbytes:
                        self._deliver()
                        peeks = True
                else:
                    peeks = False
                    self._end += got
                    self._parse()
                    if got < place.nbytes:  # there is no more
                        break
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ProtocolError) as e:
            return self._fail(str(e))
        if turn:
            self.last_received = self._loop.time()

    def _room(self) -> memoryview:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return self._buffer[self._end :]

    def _parse(self) -> None:
        """Takes all whole messages out of the buffer, and the beginning of the next one."""
        while not self._closed:
            left = self._end - self._begin
            if self._incoming is None:
                if left < HEAD_BYTES:
                    return
                incoming = unpack_head(self._buffer[self._begin : self._begin + HEAD_BYTES])
                whole = HEAD_BYTES + incoming.extra_bytes
                if left < whole:
                    return
                extra = bytes(self._buffer[self._begin + HEAD_BYTES : self._begin + whole])
                self._begin += whole
                left -= whole
                self._incoming = incoming = incoming._replace(head=incoming.head._replace(extra=extra))
                self._body = self._memory(incoming)
                self._filled = self._present(incoming)
                large = self._checksums and self._body.nbytes - left >= _DIRECT_BYTES
                self._digest, self._summed = xxhash.xxh3_64() if large else None, 0
            taken = min(left, self._body.nbytes - self._filled)
            if taken:
                self._body[self._filled : self._filled + taken] = self._buffer[self._begin : self._begin + taken]
                self._begin += taken
                self._filled += taken
            if self._filled < self._body.nbytes:
                return
            self._deliver()

    def _memory(self, incoming: Incoming) -> memoryview:
        if not incoming.nbytes:
            return memoryview(b"")
        handler = self._handler
        place = handler.allocate(self, incoming.head, incoming.nbytes) if handler is not None else None
        if place is None or place.nbytes != incoming.nbytes:
            place = fresh_memory(incoming.nbytes)
        return place.cast("B")

    def _present(self, incoming: Incoming) -> int:
        """Bytes of a body that are there already, whose memory was chosen."""
        return 0

    def _deliver(self) -> None:
        incoming, body = self._incoming, self._body
        assert incoming is not None
        digest, self._digest = self._digest or xxhash.xxh3_64(), None
        self._incoming, self._body = None, memoryview(b"")
        if incoming.checksum and _finished(digest, [body[self._summed :]]) != incoming.checksum:
            raise ProtocolError("a message has arrived damaged")
        if self._handler is not None:
            self._handler.on_message(self, incoming.head, body)

    # -- the end ------------------------------------------------------------------------------------------

    def _fail(self, why: str) -> None:
        if not self._closed:
            self.close()
            if self._handler is not None:
                self._handler.on_closed(self, why)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._out.clear()
        self._release()


def tune(sock: socket.socket) -> None:
    """Sets what a link needs: no delay, large buffers, and an end to silence."""
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            if sock.family == getattr(socket, "AF_UNIX", None):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def bytes_of(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, not copied."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _checksum(parts: Sequence[Buffer]) -> int:
    return _finished(xxhash.xxh3_64(), parts)


def _finished(digest: xxhash.xxh3_64, parts: Sequence[Buffer]) -> int:
    for part in parts:
        digest.update(part)
    return digest.intdigest() or 1
