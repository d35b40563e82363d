"""How the communicator of a region reaches those of others: it listens, or connects outwards only, directly or through a relay.

An endpoint is a text of parts with commas between them: `10.0.0.1:4000` (TCP), `relay/NAME` (a member of the rendezvous service). A region behind
address translation registers at the service, which brings its connections and those of the others together and passes bytes on. The
service knows neither the run's token nor, with certificates, what passes.

TLS 1.3 between regions, each with a certificate in whose names (DNS) the region's name is, signed by an authority of the user's.

Both ends verify the other one: a region is who its certificate says. Files are named in `regions.toml`. Functions elsewhere, which have no files of
the client, get their content as variables, which precede the files:

    EPHEMERON_REGION_AUTHORITY, EPHEMERON_REGION_CERTIFICATE, EPHEMERON_REGION_KEY      PEM texts, or paths
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.connection import tune
from ephemeron.communication.direct.rendezvous import TOKEN_VARIABLE, Handler, Rendezvous, ServiceAddress
from ephemeron.communication.direct.tls_socket import pass_through
from ephemeron.communication.rpc.sockets import listen_tcp, not_in_children
from ephemeron.communication.unproved import UnprovedConnections
from ephemeron.errors import JobError, LinkFailed
from ephemeron.training.worker.spec import GroupNetwork

DIAL_TIMEOUT_S = 2.0
_RELAY = "relay/"
_log = logging.getLogger(__name__)

Accepted = Callable[[socket.socket, frozenset[str] | None], Awaitable[None]]
"""Takes a connected socket and the names in the other end's certificate; None: it has none. Owns the socket until it returns."""


class RegionNetwork:
    """Sockets of one region's communicator.

    Args:
        given: of the region.
        token: of the run.

    Raises:
        JobError: the relay has no token, or certificates cannot be used.
    """

    def __init__(self, given: GroupNetwork, *, token: str) -> None:
        self._given, self._token = given, token
        self._tls = MutualTls.of(authority=given.authority, certificate=given.certificate, key=given.certificate_key)
        self._listening: socket.socket | None = None
        self._relay = _relay_of(given.relay)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved = UnprovedConnections()

    async def open(self, accepted: Accepted) -> str:
        """Accepts connections from now on; returns the endpoint, "" where none can be made to this region.

        Raises:
            JobError: the address to listen at is none, or is taken.
        """
        parts = []
        if self._given.listen:
            host, port = host_and_port(self._given.listen)
            try:
                sock = listen_tcp(host, port, allow_remote=True)  # the file of regions says so
            except OSError as e:
                raise JobError(f"cannot listen at {self._given.listen}: {e.strerror}", remedy="give another address") from None
            sock.setblocking(False)
            self._listening = sock
            self._start(self._accept(sock, accepted))
            shown = f"[{host}]" if ":" in host else host
            parts.append(self._given.endpoint or f"{shown}:{sock.getsockname()[1]}")
        if self._relay is not None:
            relay = self._relay

            async def invited(ticket: str, timeout_s: float) -> None:
                fresh = socket.socket(await relay.family(), socket.SOCK_STREAM)
                channel, _ = await relay.redeem(ticket, fresh, timeout_s=timeout_s)
                self._start(self._accepted(channel.sock, accepted))

            await relay.open(self._token, "relay", _quiet(invited))
            parts.append(_RELAY + relay.name)
        return ",".join(parts)

    def can_dial(self, endpoint: str) -> bool:
        """Whether this region can connect to an endpoint."""
        return any(not part.startswith(_RELAY) or self._relay is not None for part in endpoint.split(",") if part)

    async def dial(self, endpoint: str, *, region: str) -> socket.socket:
        """Connects to the first part of an endpoint that answers.

        Raises:
            OSError: none does; `LinkFailed` is one.
        """
        failure: Exception = LinkFailed(f"region {region} has no address that can be connected to")
        for part in filter(None, endpoint.split(",")):
            try:
                if part.startswith(_RELAY):
                    sock = await self._through_relay(part.removeprefix(_RELAY))
                else:
                    sock = await self._connected(*host_and_port(part))
                if self._tls is None:
                    return sock
                return (await self._tls.secured(sock, peer=region, limit_s=DIAL_TIMEOUT_S))[0]
            except (OSError, JobError) as e:
                failure = e if isinstance(e, OSError) else LinkFailed(str(e))
        raise failure

    async def close(self) -> None:
        """Stops listening, and ends what was accepted."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        if self._relay is not None:
            await self._relay.close()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket, accepted: Accepted) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:  # out of file handles, or a client that left before it was accepted
                await asyncio.sleep(0.05)
                continue
            tune(sock)
            self._start(self._accepted(sock, accepted))

    async def _accepted(self, sock: socket.socket, accepted: Accepted) -> None:
        names = None
        try:
            not_in_children(sock)
            if self._tls is not None:
                with self._unproved.admitted(sock):
                    sock, names = await self._tls.secured(sock, peer=None, limit_s=DIAL_TIMEOUT_S)
            await accepted(sock, names)
        except OSError as e:
            _log.debug("a connection of another region ends: %s", e or type(e).__name__)
        finally:
            sock.close()

    async def _connected(self, host: str, port: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = socket.socket(found[0][0], socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                tune(not_in_children(sock))
                await loop.sock_connect(sock, found[0][4])
            except BaseException:
                sock.close()
                raise
        return sock

    async def _through_relay(self, name: str) -> socket.socket:
        if self._relay is None:
            raise LinkFailed("this region has no relay")
        ticket = await self._relay.invite(name, "relay", timeout_s=DIAL_TIMEOUT_S)
        fresh = socket.socket(await self._relay.family(), socket.SOCK_STREAM)
        channel, _ = await self._relay.redeem(ticket, fresh, timeout_s=DIAL_TIMEOUT_S)
        return channel.sock


def host_and_port(address: str) -> tuple[str, int]:
    """Parts of `HOST:PORT`.

    Raises:
        JobError: it is none.
    """
    host, _, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65_535:
        raise JobError(f"{address!r} is no address", remedy="give HOST:PORT")
    return host, int(port)


def _relay_of(address: str) -> Rendezvous | None:
    if not address:
        return None
    token = (variable(TOKEN_VARIABLE) or "").strip()
    if not token:
        raise JobError(f"relay = {address!r} needs {TOKEN_VARIABLE}", remedy="set it to the token of the rendezvous service")
    return Rendezvous(ServiceAddress.parse(address), token=token)


def _quiet(handler: Handler) -> Handler:
    """The same handler; a meeting that fails ends there, and the other end tries again."""

    async def handled(ticket: str, timeout_s: float) -> None:
        try:
            await handler(ticket, timeout_s)
        except OSError as e:
            _log.debug("a relayed connection of another region was not made: %s", e)

    return handled


# -- TLS 1.3 between regions --------------------------------------------------------------------------------------


VARIABLES = ("EPHEMERON_REGION_AUTHORITY", "EPHEMERON_REGION_CERTIFICATE", "EPHEMERON_REGION_KEY")
"""Certificate of the authority, that of the region, and its key."""


class MutualTls:
    """One region's end.

    Args:
        authority, certificate, key: PEM texts.

    Raises:
        JobError: they are none, or do not belong together.
    """

    def __init__(self, *, authority: str, certificate: str, key: str) -> None:
        try:
            self._client, self._server = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._server.verify_mode = ssl.CERT_REQUIRED
            with tempfile.TemporaryDirectory() as folder:  # `ssl` reads chains from files only; the folder is this user's alone
                file = Path(folder) / "pem"
                file.touch(mode=0o600)
                file.write_text(f"{key.strip()}\n{certificate.strip()}\n")
                for context in (self._client, self._server):
                    context.minimum_version = ssl.TLSVersion.TLSv1_3
                    context.load_verify_locations(cadata=authority)
                    context.load_cert_chain(file)
        except (OSError, ValueError) as e:
            raise JobError(
                f"the certificates of the region cannot be used: {e}", remedy="give PEM files of an authority, a certificate and its key"
            ) from None

    @classmethod
    def of(cls, *, authority: str, certificate: str, key: str) -> MutualTls | None:
        """From files, unless the variables are set; None: neither.

        Raises:
            JobError: one of the three is missing, or cannot be read.
        """
        named = [variable(name) or path for name, path in zip(VARIABLES, (authority, certificate, key), strict=True)]
        if not any(named):
            return None
        if not all(named):
            raise JobError("certificates of regions belong together: authority, certificate and certificate_key", remedy="give all three")
        texts = [_text(value) for value in named]
        return cls(authority=texts[0], certificate=texts[1], key=texts[2])

    async def secured(self, sock: socket.socket, *, peer: str | None, limit_s: float) -> tuple[socket.socket, frozenset[str]]:
        """Encrypts what is sent over a socket from now on.

        Args:
            sock: connected and non-blocking; owned from now on.
            peer: region that was dialled; None: this end was.
            limit_s: for the handshake.

        Returns:
            A plain socket whose bytes pass over `sock` encrypted, and the names in the other end's certificate.

        Raises:
            OSError: the handshake fails, or takes too long.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        sock = socket.socket(fileno=sock.detach())  # no other owner may close it under the event loop
        try:
            async with asyncio.timeout(limit_s):
                if peer is None:
                    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._server)
                else:
                    transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=self._client, server_hostname=peer)
        except BaseException:
            sock.close()
            raise
        given = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        names = frozenset(name for kind, name in given if kind == "DNS")
        plain, _ = pass_through(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        return plain, names


def _text(value: str) -> str:
    if value.lstrip().startswith("-----BEGIN"):
        return value
    try:
        return Path(value).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else "it is no text"
        raise JobError(f"{value} cannot be read: {why}", remedy="give a PEM file") from None
