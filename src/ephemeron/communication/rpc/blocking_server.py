"""Server for threads: `BlockingServer`, with the same frames as `Server`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

from ephemeron.communication.rpc.auth import Offer, Token, token_text
from ephemeron.communication.rpc.blocking_connection import BlockingConnection, deadline_in, drive
from ephemeron.communication.rpc.frame import OBJECT, Buffer, Frame, FrameMessage, Kind, message
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.objects import object_message, object_of
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.session import SendState, deadline_of, fault
from ephemeron.communication.rpc.sockets import listen_tcp, listen_unix
from ephemeron.communication.unproved import UnprovedConnections, origin, shut
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, TokenRefused

BlockingHandler: TypeAlias = Callable[[str, dict[str, Any], list[Any]], tuple[Mapping[str, object], Sequence[Buffer]]]
"""`(method, params, buffers) -> (reply, buffers)`; called in several threads at once."""
BlockingObjectHandler: TypeAlias = Callable[[str, Any], Any]
"""`(method, value) -> value`."""
_PROOF_S = 10.0
_log = logging.getLogger(__name__)
_SPARE = 2
"""Threads of a connection that wait for the next request; one of them reads."""
_here = threading.local()


def cancelled() -> bool:
    """Whether the call of this thread's handler has ended: it was cancelled, is over its deadline, or its client is gone."""
    call: _Call | None = getattr(_here, "call", None)
    return call is not None and call.over


class BlockingServer:
    """Answers calls of clients that know the token, each in a thread.

    A handler cannot be stopped from outside: long ones check `cancelled()` regularly. An exception of a handler is sent
    back as a type name and a text.

    Args:
        handler: answers one call.
        token: the shared secret; must not be empty.
        objects: answers one call with an object. Without it, nothing is ever unpickled.
        options: see `Options`.
        max_threads: handlers at once, per connection; further requests wait.
    """

    def __init__(
        self,
        handler: BlockingHandler,
        *,
        token: Token,
        objects: BlockingObjectHandler | None = None,
        options: Options | None = None,
        max_threads: int = 64,
    ) -> None:
        if not token:
            raise ValueError("a server without a token would answer anybody")
        self.handler, self.objects = handler, objects
        self.options = options or Options()
        self.max_threads = max_threads
        self._token = token_text(token)
        self.unproved = UnprovedConnections()
        """Connections whose client has not proved the token yet; each has a thread."""
        self._listening: list[tuple[socket.socket, Callable[[], None]]] = []
        self._crews: set[_Crew] = set()
        self._closed = False

    def listen_tcp(self, host: str = "127.0.0.1", port: int = 0, *, allow_remote: bool = False) -> tuple[str, int]:
        """Listens and returns the address; see `Server.listen_tcp`."""
        sock = listen_tcp(host, port, allow_remote=allow_remote)
        self._listen(sock, lambda: None)
        bound_host, bound_port, *_ = sock.getsockname()
        return str(bound_host), int(bound_port)

    def listen_unix(self, path: str | os.PathLike[str]) -> None:
        """Listens on a Unix socket that only this user can open; a stale socket file is replaced."""
        self._listen(*listen_unix(os.fspath(path)))

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._crews)

    def close(self) -> None:
        """Stops listening and closes all connections. Running handlers see it by `cancelled()` and are not waited for."""
        self._closed = True
        for sock, remove in self._listening:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            sock.close()
            remove()
        self._listening.clear()
        for crew in list(self._crews):
            crew.link.close("the server closed this connection")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _listen(self, sock: socket.socket, remove: Callable[[], None]) -> None:
        self._listening.append((sock, remove))
        threading.Thread(target=self._accept, args=(sock,), name="rpc-accept", daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listening.accept()
            except OSError:
                if listening.fileno() >= 0:
                    time.sleep(0.05)  # out of handles, or a client that left at once: others still want in
                continue
            settle = self.unproved.admit(origin(sock), partial(shut, sock))
            threading.Thread(target=self._greet, args=(sock, settle), name="rpc-greet", daemon=True).start()

    def _greet(self, sock: socket.socket, settle: Callable[[], None]) -> None:
        wire = self.options.wire(sock)
        try:
            greeting = wire.greeting(self._token, client=False, offer=self.options.offer(shared=True))
            theirs = drive(wire, greeting, deadline_in(_PROOF_S), writing=False)
        except (ConnectionError, ProtocolError, TokenRefused, CallTimedOut) as e:
            wire.close()
            _log.debug("a connection ends before its proof: %s", e)
            return
        finally:
            settle()
        crew = _Crew(self, wire, theirs)
        self._crews.add(crew)
        try:
            if not self._closed:
                crew.work(permanent=True)
        finally:
            self._crews.discard(crew)


class _Call:
    """A request that waits for its handler, or is with it."""

    __slots__ = ("_deadline", "_told", "frame")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._deadline = deadline_in(deadline_of(frame))
        self._told = False

    @property
    def over(self) -> bool:
        return self._told or (self._deadline is not None and time.monotonic() >= self._deadline)

    def cancel(self) -> None:
        self._told = True


class _Crew:
    """Threads of one connection. One reads, one more waits, the others run handlers."""

    def __init__(self, server: BlockingServer, wire: FrameSocket, theirs: Offer) -> None:
        self.link = BlockingConnection(wire, server.options.session(theirs, client=False), self._asked)
        self._server = server
        self._jobs: deque[_Call] = deque()
        self._threads = self._idle = 1

    def work(self, *, permanent: bool = False) -> None:
        """Reads and answers until the connection is lost, or others do so."""
        link, lost = self.link, False
        while not lost:
            link.wait(lambda: bool(self._jobs))
            with link.mutex:
                lost = link.session.lost is not None
                if lost or not self._jobs:
                    continue
                call = self._jobs.popleft()
                self._idle -= 1
                hire = not self._idle and self._threads < self._server.max_threads
                self._idle += hire
                self._threads += hire
            if hire:
                threading.Thread(target=self.work, name="rpc-handler", daemon=True).start()
            self._do(call)
            del call
            with link.mutex:
                if self._idle >= _SPARE and not permanent:
                    self._threads -= 1
                    return
                self._idle += 1
        if permanent:
            link.close("the connection is lost")

    def _asked(self, frame: Frame) -> None:
        call = _Call(frame)
        self.link.session.running[frame.id] = call.cancel
        self._jobs.append(call)

    def _do(self, call: _Call) -> None:
        if call.over:
            with self.link.mutex:
                self.link.session.running.pop(call.frame.id, None)
            return
        _here.call = call
        try:
            self._answer(call)
        except ConnectionLost:
            pass  # the reading thread notices, too, and ends the connection
        finally:
            _here.call = None

    def _answer(self, call: _Call) -> None:
        frame = call.frame
        try:
            answer = self._reply(frame)
        except BaseException as e:  # noqa: BLE001 - any exception of the handler is sent to the caller
            error = CallTimedOut(f"no reply to {frame.tag['m']!r} in time") if call.over else e
            answer = message(Kind.ERROR, frame.id, fault(error), limits=self.link.wire.limits)
        with self.link.mutex:
            wanted = self.link.session.running.pop(frame.id, None) is not None
        if wanted:
            self.link.send(answer, SendState())

    def _reply(self, frame: Frame) -> FrameMessage:
        server, limits, method = self._server, self.link.wire.limits, frame.tag["m"]
        if not frame.flags & OBJECT:
            reply, buffers = server.handler(method, frame.tag.get("p", {}), frame.buffers)
            return message(Kind.REPLY, frame.id, {"p": dict(reply)}, buffers, limits=limits)
        if server.objects is None:
            raise LookupError(f"this server takes no objects, not even for {method!r}")
        value = server.objects(method, object_of(frame, server.options.receive))
        return object_message(Kind.REPLY, frame.id, {}, value, limits=limits)
