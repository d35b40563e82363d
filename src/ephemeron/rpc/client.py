"""The calling end: many calls at once over one connection."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ephemeron.rpc.errors import ProtocolError, RemoteError
from ephemeron.rpc.frame import MAX_FRAME, Buffer, Connection, Frame, Kind

_FLUSH_S = 5.0


class Client:
    """A connection to a `Server`. Make one with `connect_tcp` or `connect_unix`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._lost: Exception | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def connect_tcp(
        cls, host: str, port: int, *, token: str, timeout_s: float = 5.0, max_frame: int = MAX_FRAME
    ) -> Client:
        """Connects and proves the token.

        Raises:
            ConnectionError: nobody answers, or not in time.
            TokenRefused: the two ends do not share the token.
            ProtocolError: something else listens there.
        """
        loop = asyncio.get_running_loop()

        async def dial() -> socket.socket:
            where = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return await _dial(where[0][0], where[0][4])

        return await cls._connect(dial, token, timeout_s, max_frame, f"{host}:{port}")

    @classmethod
    async def connect_unix(
        cls, path: str | os.PathLike[str], *, token: str, timeout_s: float = 5.0, max_frame: int = MAX_FRAME
    ) -> Client:
        """Like `connect_tcp`, over a Unix socket."""

        async def dial() -> socket.socket:
            return await _dial(socket.AF_UNIX, os.fspath(path))

        return await cls._connect(dial, token, timeout_s, max_frame, os.fspath(path))

    @classmethod
    async def _connect(
        cls,
        dial: Callable[[], Awaitable[socket.socket]],
        token: str,
        timeout_s: float,
        max_frame: int,
        where: str,
    ) -> Client:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = Connection(await dial(), max_frame=max_frame)
                await connection.prove(token, client=True)
                return cls(connection)
        except BaseException as e:
            if connection is not None:
                connection.close()
            if isinstance(e, TimeoutError):
                raise ConnectionError(f"no answer from {where} within {timeout_s:g} s") from e
            if isinstance(e, OSError) and not isinstance(e, ConnectionError):
                raise ConnectionError(f"cannot connect to {where}: {e}") from e
            raise

    @property
    def connected(self) -> bool:
        """False once the connection is known to be lost or closed."""
        return self._lost is None

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, buffers: Sequence[Buffer] = ()
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Calls and waits for the reply. The buffers are free to change once this returns or raises.

        Cancelling it cancels the handler at the server.

        Raises:
            RemoteError: the handler raised.
            ConnectionError: the connection was lost; whether the handler ran is not known.
            ProtocolError: request too large.
        """
        if self._lost is not None:
            raise ConnectionError(str(self._lost)) from self._lost
        id = next(self._ids)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[id] = answer
        try:
            await self._send(id, {"m": method, "p": dict(params or {})}, buffers)
            frame = await answer
        except asyncio.CancelledError:
            self._in_background(self._connection.send(Kind.CANCEL, id, {}))
            raise
        finally:
            self._pending.pop(id, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also when sending failed first
        if frame.kind is Kind.ERROR:
            raise RemoteError(str(frame.header["type"]), str(frame.header["text"]))
        return frame.header["p"], frame.buffers

    async def close(self) -> None:
        """Closes the connection; pending calls fail with `ConnectionError`."""
        self._fail(ConnectionResetError("this client was closed"))
        tasks = [self._reader, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connection.close()

    async def _send(self, id: int, header: dict[str, Any], buffers: Sequence[Buffer]) -> None:
        # A frame once begun must be finished, or no other frame can follow it. So a cancelled call first waits
        # for its own bytes to leave, and breaks the connection if the other end does not take them.
        sending = asyncio.ensure_future(self._connection.send(Kind.REQUEST, id, header, buffers))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            if not sending.cancelled():
                done, _ = await asyncio.wait({sending}, timeout=_FLUSH_S)
                if not done:
                    self._fail(ConnectionResetError("the other end does not take a request"))
                    self._connection.interrupt()
                    sending.cancel()
            raise

    def _in_background(self, work: Any) -> None:
        async def quietly() -> None:
            try:
                await work
            except ConnectionError:
                pass  # nothing is left to cancel

        if self._lost is not None:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._connection.receive()
                if frame.kind not in (Kind.REPLY, Kind.ERROR):
                    raise ProtocolError("a client is sent replies and nothing else")
                answer = self._pending.get(frame.id)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
                del frame
        except (ConnectionError, ProtocolError) as e:
            self._fail(e)
            self._connection.interrupt()

    def _fail(self, cause: Exception) -> None:
        if self._lost is None:
            self._lost = cause
        for answer in self._pending.values():
            if not answer.done():
                error = ConnectionError(f"connection lost: {cause}")
                error.__cause__ = cause
                answer.set_exception(error)


async def _dial(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
