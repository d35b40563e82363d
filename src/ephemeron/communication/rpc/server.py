"""Server on asyncio: one task per connection, one task per call."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from ephemeron.communication.rpc.async_connection import AsyncConnection, drive, timed
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.communication.rpc.frame import OBJECT, Buffer, Frame, Kind, message
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.objects import object_message, object_of
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.session import SendState, deadline_of, fault
from ephemeron.communication.rpc.sockets import listen_tcp, listen_unix
from ephemeron.communication.unproved import UnprovedConnections
from ephemeron.errors import ProtocolError, TokenRefused

Handler: TypeAlias = Callable[[str, dict[str, Any], list[Any]], Awaitable[tuple[Mapping[str, object], Sequence[Buffer]]]]
"""`async (method, params, buffers) -> (reply, buffers)`. The buffers it is given are its own to keep."""
ObjectHandler: TypeAlias = Callable[[str, Any], Awaitable[Any]]
"""`async (method, value) -> value`."""
_PROOF_S = 10.0
_log = logging.getLogger(__name__)
_FLUSH_S = 5.0


class Server:
    """Answers calls of clients that know the token.

    A call's handler is cancelled when its client cancels the call, at the call's deadline, and when the client is gone. An
    exception of a handler is sent back as a type name and a text.

    Args:
        handler: answers one call; called concurrently.
        token: the shared secret; must not be empty.
        objects: answers one call with an object. Without it, nothing is ever unpickled.
        options: see `Options`.
    """

    def __init__(self, handler: Handler, *, token: Token, objects: ObjectHandler | None = None, options: Options | None = None) -> None:
        if not token:
            raise ValueError("a server without a token would answer anybody")
        self._handler, self._objects = handler, objects
        self._token = token_text(token)
        self.unproved = UnprovedConnections()
        """Connections whose client has not proved the token yet."""
        self._options = options or Options()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._removals: list[Callable[[], None]] = []

    async def listen_tcp(self, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False) -> tuple[str, int]:
        """Listens and returns the address; port 0 takes a free one.

        Raises:
            JobError: the address can be reached from other machines, and `allow_remote` is not set.
        """
        sock = listen_tcp(host, port, allow_remote=allow_remote)
        self._listen(sock)
        bound_host, bound_port, *_ = sock.getsockname()
        return str(bound_host), int(bound_port)

    async def listen_unix(self, path: str | os.PathLike[str]) -> None:
        """Listens on a Unix socket that only this user can open; a stale socket file is replaced."""
        sock, remove = listen_unix(os.fspath(path))
        self._removals.append(remove)
        self._listen(sock)

    async def serve(self, sock: socket.socket, *, begun: Callable[[FrameSocket], None] = lambda wire: None) -> None:
        """Answers the calls of one client over a connected, non-blocking socket, until the connection ends.

        Args:
            sock: owned from now on.
            begun: called first, with the connection's frames and their counts.
        """
        wire = self._options.wire(sock)
        begun(wire)
        try:
            await self._serve(wire)
        finally:
            wire.close()

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
        for remove in self._removals:
            remove()
        self._sockets, self._removals = [], []

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
            wire = self._options.wire(sock)
            # Closed here and not in the task itself: one that is cancelled before its first step never runs.
            self._start(self._serve(wire)).add_done_callback(partial(_close, wire))

    async def _serve(self, wire: FrameSocket) -> None:
        options = self._options
        try:
            with self.unproved.admitted(wire.sock):
                async with asyncio.timeout(_PROOF_S):
                    greeting = wire.greeting(self._token, client=False, offer=options.offer(shared=True))
                    theirs = await drive(wire, greeting, writing=False)
        except (ConnectionError, ProtocolError, TokenRefused, TimeoutError) as e:
            _log.debug("a connection ends before its proof: %s", e)
            return
        peer = AsyncConnection(wire, options.session(theirs, client=False))
        try:
            await peer.read(lambda frame: self._begin(peer, frame))
        finally:
            await peer.close("the server closed this connection")

    def _begin(self, peer: AsyncConnection, frame: Frame) -> None:
        peer.session.running[frame.id] = partial(_cancel, peer.start(self._answer(peer, frame)))

    async def _answer(self, peer: AsyncConnection, frame: Frame) -> None:
        id, limits, method = frame.id, peer.wire.limits, frame.tag["m"]
        try:
            async with timed(deadline_of(frame), f"no reply to {method!r}"):
                if frame.flags & OBJECT:
                    answer = object_message(Kind.REPLY, id, {}, await self._object(method, frame), limits=limits)
                else:
                    reply, plain = await self._handler(method, frame.tag.get("p", {}), frame.buffers)
                    answer = message(Kind.REPLY, id, {"p": dict(reply)}, plain, limits=limits)
        except Exception as e:  # noqa: BLE001 - any exception of the handler is sent to the caller
            answer = message(Kind.ERROR, id, fault(e), limits=limits)
        # From here on a cancel must not reach this task: half a frame would ruin the connection.
        if peer.session.running.pop(id, None) is None:
            return
        try:
            await peer.send(answer, SendState(), flush_s=_FLUSH_S)
        except ConnectionError:
            pass  # the receiving side of this connection notices, too, and ends it

    async def _object(self, method: str, frame: Frame) -> Any:
        if self._objects is None:
            raise LookupError(f"this server takes no objects, not even for {method!r}")
        return await self._objects(method, object_of(frame, self._options.receive))


def _close(wire: FrameSocket, _: asyncio.Task[None]) -> None:
    wire.close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
