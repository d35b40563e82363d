"""Connections between members that each have an HTTPS endpoint of their own, such as AWS Lambda MicroVMs, by WebSocket (RFC 6455).

A member listens on a port of its machine, to which its endpoint passes what has a token of the platform for that port. What is
announced holds no secret: the dialling member asks the platform for a token (`EndpointAccess`). Then both ends prove the run's token,
as everywhere. The endpoint ends TLS, so the platform can read the bytes.

The price is one copy more at each end, and whatever the endpoint's proxy costs in time.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ephemeron.communication.direct.connection import Connection, LinkFailed, SocketConnection
from ephemeron.communication.direct.tls_socket import until_first_ends
from ephemeron.communication.direct.transport import PROOF_TIMEOUT_S, Accepted, Transport, prove
from ephemeron.errors import MissingExtra, ProtocolError, TokenRefused

_CHUNK = 256 << 10
_MAX_MESSAGE = 1 << 20
_WRITE_LIMIT = 1 << 20
_REFUSED = (OSError, ProtocolError, TokenRefused)  # TimeoutError is an OSError


class EndpointAccess(ABC):
    """A platform's endpoints: this member's own one, and how to be let in at others."""

    @abstractmethod
    async def own(self, port: int) -> str | None:
        """Address by which others find a port of this member; None: it has no endpoint.

        Raises:
            LinkFailed: the platform does not tell.
        """

    @abstractmethod
    async def open(self, address: str) -> tuple[str, Mapping[str, str]]:
        """URL (`wss://…`) and headers with which to connect to another member.

        Args:
            address: as `own` has given it there.

        Raises:
            LinkFailed: the platform gives no token.
        """


class WebSocketTransport(Transport):
    """WebSocket connections through the members' endpoints.

    Args:
        access: of the platform.
        host: address to listen at, which the endpoint reaches.

    Raises:
        MissingExtra: the library `websockets` is not installed.
    """

    name = "websocket"

    def __init__(self, access: EndpointAccess, *, host: str) -> None:
        try:
            import websockets.asyncio.client
            import websockets.asyncio.server
        except ImportError:
            raise MissingExtra("websockets", "aws-microvm") from None
        self._websockets = websockets
        self._access, self._host = access, host
        self._server: Any = None
        self._passing: set[asyncio.Task[None]] = set()

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        async def serve(remote: Any) -> None:
            sock, passing = self._bridged(remote)
            try:
                async with asyncio.timeout(PROOF_TIMEOUT_S):
                    await prove(sock, token, client=False)
            except _REFUSED:
                sock.close()
            else:
                accepted(SocketConnection(sock, transport=self.name, dialled=False, checksums=True))
            await asyncio.shield(passing)

        self._server = await self._websockets.asyncio.server.serve(
            serve, self._host, 0, compression=None, max_size=_MAX_MESSAGE, write_limit=_WRITE_LIMIT
        )
        try:
            return await self._access.own(int(self._server.sockets[0].getsockname()[1]))
        except LinkFailed:
            self._server.close()
            raise

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                url, headers = await self._access.open(address)
                remote = await self._websockets.asyncio.client.connect(
                    url,
                    additional_headers=headers,
                    compression=None,
                    max_size=_MAX_MESSAGE,
                    write_limit=_WRITE_LIMIT,
                    open_timeout=None,
                    proxy=None,
                )
                sock, _ = self._bridged(remote)
                await prove(sock, token, client=True)
            return SocketConnection(sock, transport=self.name, dialled=True, checksums=True)
        except BaseException as e:
            if sock is not None:
                sock.close()
            if isinstance(e, (*_REFUSED, self._websockets.exceptions.WebSocketException)) and not isinstance(e, LinkFailed):
                raise LinkFailed(f"websocket {address!r}: {str(e) or 'not in time'}") from e
            raise

    async def close(self) -> None:
        if self._server is not None:
            self._server.close(close_connections=False)

    def _bridged(self, remote: Any) -> tuple[socket.socket, asyncio.Task[None]]:
        """A plain socket whose bytes go through a WebSocket, and the task that passes them on."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._pass(ours, remote))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        return theirs, task

    async def _pass(self, sock: socket.socket, remote: Any) -> None:
        loop = asyncio.get_running_loop()

        async def outward() -> None:
            while data := await loop.sock_recv(sock, _CHUNK):
                await remote.send(data)

        async def inward() -> None:
            async for data in remote:
                if not isinstance(data, bytes):
                    return  # a message of text is none of ours
                await loop.sock_sendall(sock, data)

        try:
            await until_first_ends(outward(), inward())
        finally:
            sock.close()
            await remote.close()
