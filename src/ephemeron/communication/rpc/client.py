"""Client on asyncio: many concurrent calls over one connection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ephemeron.communication.rpc.async_connection import AsyncConnection, drive, timed
from ephemeron.communication.rpc.auth import Token
from ephemeron.communication.rpc.frame import Buffer, Frame, Kind, Receive, message
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.objects import object_of
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.session import CallRequest, PendingCall, SendState

_FLUSH_S = 5.0


class Client:
    """A connection to a `Server`. Make one with `connect_tcp`, `connect_unix` or `connect_shared`.

    A lost connection is not made anew: the caller connects again.
    """

    def __init__(self, peer: AsyncConnection) -> None:
        self._peer = peer
        self._session = peer.session
        peer.start(peer.read(lambda _: None))

    @classmethod
    async def connect_tcp(cls, host: str, port: int, *, token: Token, timeout_s: float = 5.0, options: Options | None = None) -> Client:
        """Connects and proves the token.

        Raises:
            ConnectionError: no answer, or none in time.
            TokenRefused: the two ends do not share the token.
            ProtocolError: something else listens there.
        """
        loop = asyncio.get_running_loop()

        async def dial() -> socket.socket:
            where = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return await _dial(where[0][0], where[0][4])

        return await cls._connect(dial, token, timeout_s, f"{host}:{port}", options or Options())

    @classmethod
    async def connect_unix(
        cls, path: str | os.PathLike[str], *, token: Token, timeout_s: float = 5.0, options: Options | None = None
    ) -> Client:
        """Like `connect_tcp`, over a Unix socket."""

        return await cls._connect_path(os.fspath(path), token, timeout_s, options, shared=False)

    @classmethod
    async def connect_shared(
        cls, path: str | os.PathLike[str], *, token: Token, timeout_s: float = 5.0, options: Options | None = None
    ) -> Client:
        """Like `connect_unix`, with large data sections in shared memory where both ends have it; see `transport`."""
        return await cls._connect_path(os.fspath(path), token, timeout_s, options, shared=True)

    @classmethod
    async def connect_socket(cls, sock: socket.socket, *, token: Token, timeout_s: float = 5.0, options: Options | None = None) -> Client:
        """Like `connect_tcp`, over a connected, non-blocking socket, which is owned from now on."""

        async def given() -> socket.socket:
            return sock

        return await cls._connect(given, token, timeout_s, "the other end", options or Options())

    @classmethod
    async def _connect_path(cls, path: str, token: Token, timeout_s: float, options: Options | None, *, shared: bool) -> Client:
        async def dial() -> socket.socket:
            return await _dial(socket.AF_UNIX, path)

        return await cls._connect(dial, token, timeout_s, path, options or Options(), shared=shared)

    @classmethod
    async def _connect(
        cls,
        dial: Callable[[], Awaitable[socket.socket]],
        token: Token,
        timeout_s: float,
        where: str,
        options: Options,
        *,
        shared: bool = False,
    ) -> Client:
        wire: FrameSocket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                wire = options.wire(await dial())
                greeting = wire.greeting(token, client=True, offer=options.offer(shared=shared))
                theirs = await drive(wire, greeting, writing=False)
                return cls(AsyncConnection(wire, options.session(theirs, client=True)))
        except BaseException as e:
            if wire is not None:
                wire.close()
            if isinstance(e, TimeoutError):
                raise ConnectionError(f"no answer from {where} within {timeout_s:g} s") from e
            if isinstance(e, OSError) and not isinstance(e, ConnectionError):
                raise ConnectionError(f"cannot connect to {where}: {e}") from e
            raise

    @property
    def connected(self) -> bool:
        """False once the connection is known to be lost or closed."""
        return self._session.lost is None

    @property
    def transport(self) -> str:
        """`tcp`, `unix` or `shared`."""
        return self._peer.wire.transport

    @property
    def wire(self) -> FrameSocket:
        """The connection, for its counters."""
        return self._peer.wire

    async def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float | None = None,
        receive: Receive = Receive.VIEWS,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Calls and waits for the reply. The buffers are free to change once this returns or raises.

        Cancelling it, or its deadline, cancels the handler at the server.

        Args:
            params: a JSON object.
            timeout_s: how long the whole call may take.
            receive: which type the reply's buffers have: `memoryview`s or `bytes`.

        Raises:
            RemoteError: the handler raised.
            CallTimedOut: no reply in time.
            ConnectionLost: the connection was lost; `may_repeat` tells whether the handler cannot have run.
            ProtocolError: request too large.
        """
        frame = await self._ask(CallRequest(method, params or {}, buffers), receive, timeout_s)
        return frame.tag.get("p", {}), frame.buffers

    async def call_object(self, method: str, value: Any, *, timeout_s: float | None = None, receive: Receive = Receive.COPIES) -> Any:
        """Like `call`, for anything that can be pickled; see `objects.loads` for the types of the result."""
        request = CallRequest(method, {}, value=value, is_object=True)
        return object_of(await self._ask(request, receive, timeout_s), receive)

    async def close(self) -> None:
        """Closes the connection; pending calls fail with `ConnectionLost`."""
        await self._peer.close("this client was closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _ask(self, request: CallRequest, receive: Receive, timeout_s: float | None) -> Frame:
        session, came = self._session, asyncio.Event()
        id, answer = session.next_id(), PendingCall(receive, came.set)
        sending = request.message(Kind.REQUEST, id, limits=self._peer.wire.limits, timeout_s=timeout_s)
        try:
            async with timed(timeout_s, f"no reply to {request.method!r}"):
                await self._room()
                session.answers[id] = answer
                await self._peer.send(sending, answer, flush_s=_FLUSH_S)
                await came.wait()
            return answer.result()
        finally:
            if answer.begun and not answer.done and session.lost is None:
                self._peer.start(self._cancel(id))
            else:
                self._forget(id)

    async def _room(self) -> None:
        while self._session.busy:
            self._peer.freed.clear()
            await self._peer.freed.wait()
        if self._session.lost is not None:
            raise self._session.loss(may_repeat=True)

    async def _cancel(self, id: int) -> None:
        # The call counts until the other end knows of its end, or a further call could exceed `max_calls` there.
        try:
            await self._peer.send(message(Kind.CANCEL, id, {}, limits=self._peer.wire.limits), SendState(), flush_s=_FLUSH_S)
        except ConnectionError:
            pass  # nothing is left to cancel
        finally:
            self._forget(id)

    def _forget(self, id: int) -> None:
        self._session.answers.pop(id, None)
        self._peer.freed.set()


async def _dial(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
