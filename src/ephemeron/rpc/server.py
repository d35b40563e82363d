"""The answering end: one task per connection, one task per call."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from ephemeron.rpc.errors import ProtocolError, TokenRefused
from ephemeron.rpc.frame import MAX_FRAME, Buffer, Connection, Frame, Kind

Handler: TypeAlias = Callable[
    [str, dict[str, Any], list[memoryview]], Awaitable[tuple[dict[str, Any], Sequence[Buffer]]]
]
"""`async (method, params, buffers) -> (reply, buffers)`. The buffers it is given are its own to keep."""

_PROOF_S = 10.0


class Server:
    """Answers calls of clients that know the token.

    A call's handler is cancelled when its client cancels the call or goes away. What a handler raises is sent
    back as a type name and a text.

    Args:
        handler: answers one call; called concurrently.
        token: the shared secret; must not be empty.
        max_frame: largest request or reply, bytes.
    """

    def __init__(self, handler: Handler, *, token: str, max_frame: int = MAX_FRAME) -> None:
        if not token:
            raise ValueError("a server without a token would answer anybody")
        self._handler = handler
        self._token = token
        self._max_frame = max_frame
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._paths: list[str] = []

    async def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listens and returns the address; port 0 takes a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=1024)
        self._listen(sock)
        bound_host, bound_port, *_ = sock.getsockname()
        return str(bound_host), int(bound_port)

    async def listen_unix(self, path: str | os.PathLike[str]) -> None:
        """Listens on a Unix socket that only this user can open; a stale socket file is replaced."""
        name = os.fspath(path)
        if os.path.exists(name) and stat.S_ISSOCK(os.stat(name).st_mode):
            os.unlink(name)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(name)
        os.chmod(name, 0o600)
        sock.listen(1024)
        self._paths.append(name)
        self._listen(sock)

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._tasks) - len(self._sockets)

    async def close(self) -> None:
        """Stops listening, cancels all handlers, closes all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        for path in self._paths:
            if os.path.exists(path):
                os.unlink(path)
        self._sockets, self._paths = [], []

    def _listen(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sockets.append(sock)
        self._start(self._accept(sock))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:
                # Out of file handles, or a client that left before it was accepted: others still want in.
                await asyncio.sleep(0.05)
                continue
            self._take(Connection(sock, max_frame=self._max_frame))

    def _take(self, connection: Connection) -> None:
        # Closed here and not in the task itself: one that is cancelled before its first step never runs.
        self._start(self._serve(connection)).add_done_callback(lambda _: connection.close())

    async def _serve(self, connection: Connection) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        running: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(_PROOF_S):
                await connection.prove(self._token, client=False)
            while True:
                self._dispatch(connection, await connection.receive(), calls, running)
        except (ConnectionError, ProtocolError, TokenRefused, TimeoutError):
            pass  # the other end left, or is none of ours: there is nobody to tell
        finally:
            left = list(running)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _dispatch(
        self,
        connection: Connection,
        frame: Frame,
        calls: dict[int, asyncio.Task[None]],
        running: set[asyncio.Task[None]],
    ) -> None:
        if frame.kind is Kind.CANCEL:
            if (victim := calls.pop(frame.id, None)) is not None:
                victim.cancel()
        elif frame.kind is Kind.REQUEST and frame.id not in calls:
            task = asyncio.get_running_loop().create_task(self._answer(connection, frame, calls))
            calls[frame.id] = task
            running.add(task)
            task.add_done_callback(running.discard)
        else:
            raise ProtocolError("a server is sent requests and nothing else")

    async def _answer(self, connection: Connection, frame: Frame, calls: dict[int, asyncio.Task[None]]) -> None:
        id, kind = frame.id, Kind.REPLY
        out: Sequence[Buffer] = ()
        try:
            reply, out = await self._handler(frame.header["m"], frame.header["p"], frame.buffers)
            header: dict[str, Any] = {"p": reply}
        except Exception as e:  # noqa: BLE001 - whatever the handler raised belongs to the caller
            kind, out, header = Kind.ERROR, (), {"type": type(e).__name__, "text": str(e)[:10_000]}
        # From here on a cancel must not reach this task: half a frame would ruin the connection.
        if calls.pop(id, None) is None:
            return
        try:
            await connection.send(kind, id, header, out)
        except ConnectionError:
            pass  # the receiving side of this connection notices, too, and ends it
        except (ProtocolError, TypeError, ValueError) as e:
            # Too large, or no JSON: nothing was sent yet.
            await connection.send(Kind.ERROR, id, {"type": type(e).__name__, "text": str(e)})
