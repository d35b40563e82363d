"""The port of transports, and those of the kernel: Unix sockets on one machine, TCP in one network.

A transport opens connections and proves on each of them, before anything else is read, that both ends know the run's token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from ephemeron.communication.channels.address import is_direct
from ephemeron.communication.direct.connection import Connection, LinkFailed, SocketConnection, tune
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.pinned_tls import PinnedTls
from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, handshake
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
    from ephemeron.communication.direct.shared_memory import SharedTransport, available  # which builds on this module

    return [SharedTransport() if available() else UnixTransport(), tcp]
