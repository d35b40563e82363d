"""The port of transports, and those of the kernel: Unix sockets on one machine, TCP in one network.

A transport opens connections and proves on each of them, before anything else is read, that both ends know the run's token.

Bodies of messages in memory that both ends of a connection share: members on one machine.

The connection is a Unix socket over which the two ends have passed each other an anonymous file of slots. A body is copied
into a free slot, and its head, which goes over the socket, names the slot; the receiver copies it to where it belongs and frees
the slot. A socket copies twice, too, but with system calls and buffers of the kernel that take five times as long. Where
no slot is free, or a body does not fit, it goes over the socket: nothing ever waits for a slot. The lowest free slot is
taken, so that little memory is touched, and stays in caches.

The files have no names and are gone with the last of the two processes. They are sealed: a peer cannot shrink one while the
other end reads it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ephemeron.communication.channels.address import is_direct
from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.direct.connection import Connection, LinkFailed, SocketConnection, bytes_of, tune
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.message import IN_PLACE, SHARED, Head, Incoming, pack_head
from ephemeron.communication.direct.tls_socket import PinnedTls
from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, handshake
from ephemeron.communication.rpc.memory import available
from ephemeron.communication.rpc.sockets import not_in_children
from ephemeron.communication.unproved import UnprovedConnections
from ephemeron.errors import ProtocolError, TokenRefused

HOST_VARIABLE = "EPHEMERON_DIRECT_HOST"
"""Address at which a function listens for other members: `auto` (that of its default route) or an address of its own."""
LOOPBACK = "127.0.0.1"
PROOF_TIMEOUT_S = 5.0
BACKLOG = 256

Accepted = Callable[[Connection], None]
"""Called with every connection whose other end has proved the token."""


class Transport(ABC):
    """A way to connect two members."""

    name: str

    @abstractmethod
    async def listen(self, token: str, accepted: Accepted) -> str | None:
        """Starts to accept connections.

        Returns:
            The address to announce; None: this member cannot be reached this way.
        """

    @abstractmethod
    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        """Connects to an announced address, and proves the token.

        Raises:
            LinkFailed: no answer, or not that of a member of this run.
        """

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        """Whether an attempt is worth making."""
        return self.name in theirs.addresses

    @abstractmethod
    async def close(self) -> None:
        """Stops listening. Connections stay."""


class SocketTransport(Transport):
    """A transport over stream sockets of the kernel. Subclasses say how to bind and connect."""

    checksums = False
    tls: PinnedTls | None = None

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.unproved = UnprovedConnections()
        """Connections whose other end has not proved the token yet."""

    @abstractmethod
    def bind(self) -> tuple[socket.socket, str]:
        """A listening socket, and its address."""

    @abstractmethod
    def target(self, address: str) -> tuple[socket.AddressFamily, Any]:
        """Family and address of a socket to connect to."""

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        server, address = self.bind()
        server.setblocking(False)
        self._server = not_in_children(server)
        self._start(self._accept(server, token, accepted))
        return address

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        family, target = self.target(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, target)
                return await self._proved(sock, token, dialled=True)
        except BaseException as e:
            sock.close()
            if isinstance(e, (OSError, ProtocolError, TokenRefused)):  # TimeoutError is an OSError
                raise LinkFailed(f"{self.name} {address!r}: {str(e) or type(e).__name__}") from e
            raise

    async def _accept(self, server: socket.socket, token: str, accepted: Accepted) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError:
                if server.fileno() < 0:
                    return
                await asyncio.sleep(0.1)  # out of descriptors: others may close theirs
                continue
            self._start(self._greet(sock, token, accepted))

    async def _greet(self, sock: socket.socket, token: str, accepted: Accepted) -> None:
        sock.setblocking(False)
        try:
            with self.unproved.admitted(sock):
                async with asyncio.timeout(PROOF_TIMEOUT_S):
                    connection = await self._proved(sock, token, dialled=False)
        except (OSError, ProtocolError, TokenRefused):
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            accepted(connection)

    async def _proved(self, sock: socket.socket, token: str, *, dialled: bool) -> Connection:
        sock = await proved(sock, token, dialled=dialled, tls=self.tls)
        return await self._connection(sock, dialled=dialled)

    async def _connection(self, sock: socket.socket, *, dialled: bool) -> Connection:
        return SocketConnection(sock, transport=self.name, dialled=dialled, checksums=self.checksums)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self.tls is not None:
            await self.tls.close()


class UnixTransport(SocketTransport):
    """Unix sockets in the abstract namespace: members on one machine, in one network namespace. Leaves no file behind."""

    name = "unix"

    def bind(self) -> tuple[socket.socket, str]:
        address = f"ephemeron-direct-{secrets.token_hex(8)}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(f"\0{address}")
        server.listen(BACKLOG)
        return server, address

    def target(self, address: str) -> tuple[socket.AddressFamily, Any]:
        return socket.AF_UNIX, f"\0{address}"

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        return super().reaches(own, theirs) and own.machine == theirs.machine


class TcpTransport(SocketTransport):
    """TCP to an address of the other member's machine.

    Args:
        host: address to listen at.
        tls: encrypts connections; None: they are plain.
    """

    name = "tcp"
    checksums = True

    def __init__(self, host: str = LOOPBACK, *, tls: PinnedTls | None = None) -> None:
        super().__init__()
        self.host, self.tls = host, tls
        self.checksums = tls is None  # which has its own

    def bind(self) -> tuple[socket.socket, str]:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        server = socket.create_server((self.host, 0), family=family, backlog=BACKLOG)
        return server, f"{self.host}/{server.getsockname()[1]}"

    def target(self, address: str) -> tuple[socket.AddressFamily, Any]:
        host, _, port = address.rpartition("/")
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        if not super().reaches(own, theirs):
            return False
        if own.machine == theirs.machine:
            return True
        host, own_host = (e.addresses.get(self.name, "").rpartition("/")[0] for e in (theirs, own))
        # On Lambda without a VPC all functions have one and the same address, each within its own machine.
        return host != own_host and not host.startswith("127.")


async def proved(sock: socket.socket, token: str, *, dialled: bool, tls: PinnedTls | None) -> socket.socket:
    """The socket of a connection between two members; callers limit the time.

    Args:
        sock: connected and non-blocking; owned from now on with `tls`.
        token: of the run.
        dialled: whether this end has opened the connection.
        tls: encrypts what passes; None: nothing does.

    Raises:
        TokenRefused, ProtocolError, OSError: the other end is no member of this run, or there is another one in between.
    """
    if tls is None:
        await prove(sock, token, client=dialled)
        return sock
    tune(sock)
    sock, token = await tls.secure(sock, token, dialled=dialled)
    try:
        await prove(sock, token, client=dialled)
    except BaseException:
        sock.close()
        raise
    return sock


async def prove(sock: socket.socket, token: str, *, client: bool) -> None:
    """Proves the token on a connected non-blocking socket, and checks the other end's proof; see `rpc.auth`.

    Raises:
        TokenRefused, ProtocolError, OSError: the other end is no member of this run.
    """
    loop = asyncio.get_running_loop()
    steps = handshake(token, client=client, offer=Offer(max_calls=1), nonce=secrets.token_bytes(NONCE_BYTES))
    try:
        wanted = next(steps)
        while True:
            if isinstance(wanted, int):
                try:
                    wanted = steps.send(await _exactly(sock, wanted))
                except ConnectionError as e:
                    wanted = steps.throw(e)
            else:
                await loop.sock_sendall(sock, wanted)
                wanted = steps.send(b"")
    except StopIteration:
        pass


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < nbytes:
        part = await loop.sock_recv(sock, nbytes - len(got))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        got += part
    return got


def own_address() -> str:
    """Address of this machine's default route; loopback where there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def listening_variables(channel: str) -> dict[str, str]:
    """Environment variables of functions that are deployed for a channel: with direct ones they listen in their network."""
    return {HOST_VARIABLE: "auto"} if is_direct(channel) else {}


def kernel_transports(host: str = LOOPBACK, *, tls: PinnedTls | None = None) -> list[Transport]:
    """Transports of a function that has sockets, the quickest first.

    Args:
        host: where to listen for TCP; the environment variable `EPHEMERON_DIRECT_HOST` precedes.
        tls: encrypts TCP; None: it is plain.
    """
    host = os.environ.get(HOST_VARIABLE, "").strip() or host
    tcp = TcpTransport(own_address() if host == "auto" else host, tls=tls)
    if not os.path.exists("/proc/self/ns/net"):
        return [tcp]

    return [SharedTransport() if available() else UnixTransport(), tcp]


# -- bodies of messages in memory that both ends of a connection share --------------------------------------------


SLOT_BYTES = 1 << 20
SLOTS = 24
"""Per direction of a connection: more than a round of a few members has under way at once."""
LEAST_BYTES = 16 << 10
"""Smaller bodies go over the socket with their heads."""
_FIRST = mmap.PAGESIZE
"""Place of the first slot; before it there is one byte per slot, which is 1 while the slot is in use."""
_FILE_BYTES = _FIRST + SLOTS * SLOT_BYTES
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)


class SharedConnection(SocketConnection):
    """See `Connection`.

    Args:
        sock, dialled: see `SocketConnection`.
        mine: slots that this end writes.
        theirs: slots that the other end writes.
    """

    def __init__(self, sock: socket.socket, *, dialled: bool, mine: mmap.mmap, theirs: mmap.mmap) -> None:
        import numpy as np  # not at the top: what only runs functions starts without it

        super().__init__(sock, transport="shared", dialled=dialled, checksums=False)
        self._mine, self._theirs = (np.frombuffer(m, dtype=np.uint8) for m in (mine, theirs))
        self._used = memoryview(mine)[:SLOTS]

    def send(self, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        views = [bytes_of(buffer) for buffer in buffers]
        nbytes = sum(view.nbytes for view in views)
        slot = self._free_slot() if LEAST_BYTES <= nbytes <= SLOT_BYTES and not self.closed else -1
        if slot < 0:
            return super().send(head, buffers)
        import numpy as np  # not at the top: what only runs functions starts without it

        at = _FIRST + slot * SLOT_BYTES
        for view in views:
            self._mine[at : at + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
            at += view.nbytes
        self._used[slot] = 1
        self.sent_bytes += nbytes
        self._queue(pack_head(head._replace(flags=head.flags | SHARED), nbytes=nbytes, checksum=slot), [])

    def _free_slot(self) -> int:
        return bytes(self._used).find(0)

    def _memory(self, incoming: Incoming) -> memoryview:
        if not incoming.head.flags & SHARED:
            return super()._memory(incoming)
        import numpy as np  # not at the top: what only runs functions starts without it

        slot, nbytes = incoming.checksum, incoming.nbytes
        if slot >= SLOTS or nbytes > SLOT_BYTES:
            raise ProtocolError(f"{nbytes} bytes in slot {slot} of shared memory")
        at = _FIRST + slot * SLOT_BYTES
        there, handler = self._theirs[at : at + nbytes], self._handler
        place = handler.allocate(self, incoming.head, nbytes) if handler is not None else None
        self.received_bytes += nbytes
        if place is IN_PLACE:
            return memoryview(there.data)
        if place is None or place.nbytes != nbytes:
            place = memoryview(np.empty(nbytes, dtype=np.uint8).data)
        np.frombuffer(place, dtype=np.uint8)[:] = there
        head = incoming.head._replace(flags=incoming.head.flags & ~SHARED)
        self._theirs[slot] = 0
        self._incoming = incoming._replace(head=head, checksum=0)
        return place.cast("B")

    def _present(self, incoming: Incoming) -> int:
        return incoming.nbytes if incoming.head.flags & SHARED else 0

    def _deliver(self) -> None:
        incoming = self._incoming
        if incoming is None or not incoming.head.flags & SHARED:
            return super()._deliver()
        self._incoming = incoming._replace(checksum=0)
        super()._deliver()
        self._theirs[incoming.checksum] = 0


class SharedTransport(UnixTransport):
    """Unix sockets with shared memory for large bodies: members on one machine, in one network namespace."""

    name = "shared"

    async def _connection(self, sock: socket.socket, *, dialled: bool) -> Connection:
        handle = os.memfd_create("ephemeron-direct", getattr(os, "MFD_CLOEXEC", 1) | getattr(os, "MFD_ALLOW_SEALING", 2))
        try:
            os.ftruncate(handle, _FILE_BYTES)
            fcntl.fcntl(handle, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
            mine = mmap.mmap(handle, _FILE_BYTES)
            sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))])
        finally:
            os.close(handle)
        return SharedConnection(sock, dialled=dialled, mine=mine, theirs=await _received(sock))


async def _received(sock: socket.socket) -> mmap.mmap:
    """The other end's slots.

    Raises:
        ProtocolError: it has sent something else.
        OSError: the connection is lost.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(array.array("i", [0]).itemsize))
            break
        except (BlockingIOError, InterruptedError):
            readable: asyncio.Future[Any] = loop.create_future()
            loop.add_reader(sock.fileno(), _mark, readable)
            try:
                await readable
            finally:
                loop.remove_reader(sock.fileno())
    handles = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            handles.frombytes(content[: len(content) - len(content) % handles.itemsize])
    try:
        if not data or len(handles) != 1:
            raise ProtocolError("no shared memory from the other end")
        sealed = fcntl.fcntl(handles[0], getattr(fcntl, "F_GET_SEALS", 1034)) & _SEALS == _SEALS
        if not sealed or os.fstat(handles[0]).st_size != _FILE_BYTES:
            raise ProtocolError("the shared memory of the other end has another size, or may change it")
        return mmap.mmap(handles[0], _FILE_BYTES)
    finally:
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)


def _mark(readable: asyncio.Future[Any]) -> None:
    if not readable.done():
        readable.set_result(None)


__all__ = ["LEAST_BYTES", "SLOTS", "SLOT_BYTES", "SharedConnection", "SharedTransport", "available"]
