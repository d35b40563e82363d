"""Client for threads: `BlockingClient`, with the same frames as `Client`.

Where bytes per second count most: an echo of 2.5 MB takes less time than on asyncio (`benchmarks/README.md`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ephemeron.communication.rpc.auth import Token
from ephemeron.communication.rpc.blocking_connection import BlockingConnection, deadline_in, drive
from ephemeron.communication.rpc.frame import Buffer, Frame, Kind, Receive, message
from ephemeron.communication.rpc.objects import object_of
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.session import CallRequest, PendingCall, SendState
from ephemeron.errors import CallTimedOut, ConnectionLost

_CANCEL_S = 0.25


class BlockingClient:
    """A connection to a server, for any number of threads. Make one with `connect_tcp`, `_unix` or `_shared`."""

    def __init__(self, link: BlockingConnection) -> None:
        self._link = link
        self._session = link.session

    @classmethod
    def connect_tcp(cls, host: str, port: int, *, token: Token, timeout_s: float = 5.0, options: Options | None = None) -> Self:
        """Connects and proves the token; see `Client.connect_tcp`."""
        return cls._connect(lambda: socket.create_connection((host, port), timeout_s), token, timeout_s, f"{host}:{port}", options)

    @classmethod
    def connect_unix(cls, path: str | os.PathLike[str], *, token: Token, timeout_s: float = 5.0, options: Options | None = None) -> Self:
        """Like `connect_tcp`, over a Unix socket."""
        name = os.fspath(path)
        return cls._connect(lambda: _dial_unix(name, timeout_s), token, timeout_s, name, options)

    @classmethod
    def connect_shared(cls, path: str | os.PathLike[str], *, token: Token, timeout_s: float = 5.0, options: Options | None = None) -> Self:
        """Like `connect_unix`, with large data sections in shared memory where both ends have it; see `transport`."""
        name = os.fspath(path)
        return cls._connect(lambda: _dial_unix(name, timeout_s), token, timeout_s, name, options, shared=True)

    @classmethod
    def _connect(
        cls, dial: Callable[[], socket.socket], token: Token, timeout_s: float, where: str, options: Options | None, *, shared: bool = False
    ) -> Self:
        options, deadline = options or Options(), deadline_in(timeout_s)
        try:
            sock = dial()
        except OSError as e:
            raise ConnectionError(f"cannot connect to {where}: {e}") from e
        sock.settimeout(None)
        wire = options.wire(sock)
        try:
            greeting = wire.greeting(token, client=True, offer=options.offer(shared=shared))
            theirs = drive(wire, greeting, deadline, writing=False)
        except CallTimedOut as e:
            wire.close()
            raise ConnectionError(f"no answer from {where} within {timeout_s:g} s") from e
        except BaseException:
            wire.close()
            raise
        return cls(BlockingConnection(wire, options.session(theirs, client=True)))

    @property
    def connected(self) -> bool:
        """False once the connection is known to be lost or closed."""
        return self._session.lost is None

    @property
    def transport(self) -> str:
        """`tcp`, `unix` or `shared`."""
        return self._link.wire.transport

    def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float | None = None,
        receive: Receive = Receive.VIEWS,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Calls and waits for the reply; see `Client.call`."""
        frame = self._ask(CallRequest(method, params or {}, buffers), receive, timeout_s)
        return frame.tag.get("p", {}), frame.buffers

    def call_object(self, method: str, value: Any, *, timeout_s: float | None = None, receive: Receive = Receive.COPIES) -> Any:
        """Like `call`, for anything that can be pickled; see `objects.loads` for the types of the result."""
        request = CallRequest(method, {}, value=value, is_object=True)
        return object_of(self._ask(request, receive, timeout_s), receive)

    def close(self) -> None:
        """Closes the connection; pending calls fail with `ConnectionLost`."""
        self._link.close("this client was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: CallRequest, receive: Receive, timeout_s: float | None) -> Frame:
        link, session, deadline = self._link, self._session, deadline_in(timeout_s)
        id, answer = session.next_id(), PendingCall(receive)
        sending = request.message(Kind.REQUEST, id, limits=link.wire.limits, timeout_s=timeout_s)

        def room() -> bool:
            if not session.busy:
                session.answers[id] = answer
            return id in session.answers

        try:
            if not link.wait(room, deadline):
                raise CallTimedOut(f"no room for {request.method!r} within {timeout_s:g} s")
            link.send(sending, answer, deadline=deadline)
            if not link.wait(lambda: answer.done, deadline):
                raise CallTimedOut(f"no reply to {request.method!r} within {timeout_s:g} s")
            return answer.result()
        finally:
            if not answer.done:
                self._give_up(id, answer)

    def _give_up(self, id: int, answer: PendingCall) -> None:
        # The call counts until the other end knows of its end. If that cannot be sent now, the other end has the deadline, too.
        try:
            if answer.begun and self._session.lost is None:
                cancel = message(Kind.CANCEL, id, {}, limits=self._link.wire.limits)
                self._link.send(cancel, SendState(), deadline=deadline_in(_CANCEL_S))
        except (CallTimedOut, ConnectionLost):
            return
        with self._link.mutex:
            self._session.answers.pop(id, None)
        self._link.nudge()


def _dial_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
