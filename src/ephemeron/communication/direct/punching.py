"""TCP connections between members behind address translators (NAT), by simultaneous open (RFC 9293, section 3.5).

Both members connect to the rendezvous service from a fresh port each, which makes their translators choose public addresses for
these ports, and are told each other's. Then both connect to the other's public address from the same ports at once: for
each translator the connection is one that its own member has begun. This works where a translator keeps one public address
for a port whatever it connects to ("endpoint-independent mapping", RFC 4787), as most do. Where it does not ("symmetric"), it
fails within `timeout_s`, and the relay takes over (`relay`). A member with a public address is a translator that changes nothing.

After FMI (2023) and Cylon (arXiv 2511.12185, 2026), which use it between Lambda functions. Not tried there by us.

Connections between members that neither can reach, relayed by the rendezvous service.

Every byte passes the service twice, and costs what its network costs: the transport for pairs for which punching fails. The
service sees the bytes: its own TLS protects them on the way to it only, that of the functions (`tls_socket`) from end to end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import abstractmethod

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.connection import Connection, LinkFailed, SocketConnection
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.rendezvous import SERVICE_VARIABLE, TOKEN_VARIABLE, Rendezvous, ServiceAddress
from ephemeron.communication.direct.rendezvous_protocol import Purpose
from ephemeron.communication.direct.tls_socket import PinnedTls
from ephemeron.communication.direct.transport import PROOF_TIMEOUT_S, Accepted, Transport, proved
from ephemeron.errors import JobError, ProtocolError, TokenRefused

_RETRY_S = 0.02
_log = logging.getLogger(__name__)


class MeetingTransport(Transport):
    """A transport whose connections are arranged by the rendezvous service. Subclasses say how the two sockets meet.

    Args:
        rendezvous: shared by such transports; closed with each of them.
        tls: encrypts connections from end to end; None: they are plain.
    """

    name: Purpose

    def __init__(self, rendezvous: Rendezvous, *, tls: PinnedTls | None = None) -> None:
        self._rendezvous, self._tls = rendezvous, tls

    @abstractmethod
    async def meet(self, ticket: str, *, timeout_s: float) -> socket.socket:
        """A connected socket, whose other end is the other member with the other ticket.

        Raises:
            LinkFailed, OSError: they do not meet in time.
        """

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        async def answer(ticket: str, timeout_s: float) -> None:
            try:
                accepted(await self._met(ticket, token, dialled=False, timeout_s=timeout_s))
            except LinkFailed as e:
                _log.debug("a connection that another member wants fails: %s", e)

        await self._rendezvous.open(token, self.name, answer)
        return f"{self._rendezvous.name}@{self._rendezvous.service}"

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        name, _, service = address.partition("@")
        if service != str(self._rendezvous.service):
            raise LinkFailed(f"{self.name} {address!r}: at another rendezvous service")
        began = asyncio.get_running_loop().time()
        ticket = await self._rendezvous.invite(name, self.name, timeout_s=timeout_s)
        left_s = timeout_s - (asyncio.get_running_loop().time() - began)
        return await self._met(ticket, token, dialled=True, timeout_s=left_s)

    def reaches(self, own: Endpoint, theirs: Endpoint) -> bool:
        if not super().reaches(own, theirs):
            return False
        return self._rendezvous.connected and theirs.addresses[self.name].endswith(f"@{self._rendezvous.service}")

    async def close(self) -> None:
        await self._rendezvous.close()
        if self._tls is not None:
            await self._tls.close()

    async def _met(self, ticket: str, token: str, *, dialled: bool, timeout_s: float) -> Connection:
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                sock = await self.meet(ticket, timeout_s=timeout_s)
                async with asyncio.timeout(PROOF_TIMEOUT_S):
                    sock = await proved(sock, token, dialled=dialled, tls=self._tls)
            return SocketConnection(sock, transport=self.name, dialled=dialled, checksums=self._tls is None)
        except BaseException as e:
            if sock is not None:
                sock.close()
            if isinstance(e, (OSError, ProtocolError, TokenRefused)) and not isinstance(e, LinkFailed):
                raise LinkFailed(f"{self.name}: {str(e) or 'not in time'}") from e
            raise


class PunchedTransport(MeetingTransport):
    """Direct connections through address translators."""

    name = "punched"

    async def meet(self, ticket: str, *, timeout_s: float) -> socket.socket:
        family = await self._rendezvous.family()
        registered = _bound(family, 0)
        port = int(registered.getsockname()[1])
        channel, go = await self._rendezvous.redeem(ticket, registered, timeout_s=timeout_s)
        try:
            await asyncio.sleep(go.wait_s)
            return await punch(family, port, (go.host, go.port))
        finally:
            channel.close()


async def punch(family: socket.AddressFamily, port: int, theirs: tuple[str, int]) -> socket.socket:
    """Connects a local port to an address from which the other end connects to this port at the same time.

    Connects until that succeeds, and accepts meanwhile what arrives first between two attempts. The caller sets a timeout.

    Args:
        family: of the address.
        port: local; other sockets of this process may have it.
        theirs: public address of the other end.

    Returns:
        A connected, non-blocking socket. The other end has yet to prove itself.
    """
    loop = asyncio.get_running_loop()
    listening = _bound(family, port)
    listening.listen(8)
    tasks = [loop.create_task(_connected(family, port, theirs)), loop.create_task(_accepted(listening, theirs[0]))]
    met: socket.socket | None = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        met = done.pop().result()
        return met
    finally:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, socket.socket) and found is not met:
                found.close()
        listening.close()


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", port))  # all addresses: which one is used is up to the route
    except BaseException:
        sock.close()
        raise
    return sock


async def _connected(family: socket.AddressFamily, port: int, theirs: tuple[str, int]) -> socket.socket:
    while True:
        sock = _bound(family, port)
        try:
            await asyncio.get_running_loop().sock_connect(sock, theirs)
            return sock
        except OSError:  # refused by the other end or its translator, which has not begun yet
            sock.close()
            await asyncio.sleep(_RETRY_S)
        except BaseException:
            sock.close()
            raise


async def _accepted(listening: socket.socket, host: str) -> socket.socket:
    while True:
        sock, address = await asyncio.get_running_loop().sock_accept(listening)
        if address[0] == host:
            return sock
        sock.close()


# -- connections between members that neither can reach -----------------------------------------------------------


class RelayTransport(MeetingTransport):
    """Connections through the rendezvous service."""

    name = "relay"

    async def meet(self, ticket: str, *, timeout_s: float) -> socket.socket:
        sock = socket.socket(await self._rendezvous.family(), socket.SOCK_STREAM)
        channel, _ = await self._rendezvous.redeem(ticket, sock, timeout_s=timeout_s)
        return channel.sock


def rendezvous_transports(*, tls: PinnedTls | None = None) -> list[Transport]:
    """Transports through the service of EPHEMERON_RENDEZVOUS; none where it is not set.

    Args:
        tls: encrypts connections from end to end; None: they are plain.

    Raises:
        JobError: the address is none, or EPHEMERON_RENDEZVOUS_TOKEN is missing.
    """
    service = (variable(SERVICE_VARIABLE) or "").strip()
    if not service:
        return []
    token = (variable(TOKEN_VARIABLE) or "").strip()
    if not token:
        raise JobError(f"{SERVICE_VARIABLE} is set without {TOKEN_VARIABLE}", remedy="give the token of the service")
    member = Rendezvous(ServiceAddress.parse(service), token=token)
    return [PunchedTransport(member, tls=tls), RelayTransport(member, tls=tls)]
