"""The blocking engine of both ends: one connection, many threads, and no thread that only reads.

Whoever waits for something reads, if nobody else does, and hands out what is not his own; when he has what he
wanted, the next who waits goes on, in the middle of a frame if need be. So a lone caller sends and receives in his
own thread, without a switch, and 2.5 MB come with one system call. A server's threads are of the same kind: what
they wait for is a request.

A connection belongs to the process that made it: a forked child's copy is closed at once, and using it raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from ephemeron.communication.rpc.frame import Buffer, Frame, FrameMessage, Kind, message
from ephemeron.communication.rpc.frame_socket import FrameSocket, Steps
from ephemeron.communication.rpc.objects import object_message, object_of
from ephemeron.communication.rpc.session import SendState, Session, StreamState, fault
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, StreamEnded

_FLUSH_S = 5.0
_PATIENCE_S = 1.0
"""How long a thread stays in one system call at most, where it has no earlier deadline."""


class BlockingConnection:
    """One end of a connection, for any number of threads.

    Args:
        wire: blocking and greeted; owned from now on.
        session: its tables; to be touched under `mutex` only.
        asked: told, under `mutex`, of a frame that wants a handler; must not wait.
    """

    def __init__(
        self, wire: FrameSocket, session: Session, asked: Callable[[Frame], None] = lambda frame: None
    ) -> None:
        self.wire = wire
        self.session = session
        self.mutex = threading.Lock()
        self._asked = asked
        self._sender = threading.Lock()
        self._reader = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._frame: Steps[Frame] | None = None
        self._process = os.getpid()

    def send(self, frame: FrameMessage, departure: SendState, *, deadline: float | None = None) -> None:
        """Sends one frame.

        Raises:
            ConnectionLost: the other end is gone; the frame has not left in full.
            CallTimedOut: it is not taken in time. Where part of it had left, the rest follows first; if not even that
                is taken, the connection is broken.
        """
        self._check_process()
        if not self._sender.acquire(timeout=_left(deadline)):
            raise CallTimedOut("others were still sending at the deadline")
        try:
            if self.session.lost is not None:
                raise self.session.loss(may_repeat=True)
            departure.begun = True
            with closing(self.wire.sending(frame)) as steps:
                try:
                    drive(self.wire, steps, deadline, writing=True)
                except CallTimedOut:
                    if self.wire.midway:  # others still want to use the connection
                        drive(self.wire, steps, deadline_in(_FLUSH_S), writing=True)
                        departure.left = True
                    raise
            departure.left = True
        except ConnectionError as e:
            self.fail(e)
            raise ConnectionLost(f"connection lost: {e}", may_repeat=True) from e
        except BaseException as e:
            departure.begun = departure.left or self.wire.midway
            if self.wire.midway:
                self.fail(ConnectionAbortedError(f"a frame was left unfinished ({e})"))
            raise
        finally:
            self._sender.release()

    def wait(self, ready: Callable[[], bool], deadline: float | None = None) -> bool:
        """Waits until `ready`, which is asked under `mutex`, or the connection is lost. False at the deadline."""
        self._check_process()
        while True:
            with self.mutex:
                done = ready() or self.session.lost is not None
                if done or (deadline is not None and time.monotonic() >= deadline):
                    if not self._reader.locked():
                        self._wake_one()  # it may have been our turn to read
                    return done
                waiter = None
                if not self._reader.acquire(blocking=False):
                    waiter = _Waiter(ready)
                    self._waiters.append(waiter)
            if waiter is None:
                self._read(ready, deadline)
            elif not waiter.bell.acquire(timeout=_left(deadline)):
                with self.mutex:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def fail(self, cause: Exception) -> None:
        """Breaks the connection; whatever waits fails."""
        with self.mutex:
            self.session.fail(cause)
            self.wire.interrupt()
            while self._waiters:
                self._wake_one()

    def nudge(self) -> None:
        """Wakes whoever has become ready by what was done here."""
        with self.mutex:
            self._wake_ready()

    def close(self, why: str) -> None:
        """Breaks the connection, and closes the socket when nobody is in it any more."""
        if os.getpid() == self._process:
            self.fail(ConnectionAbortedError(why))
            with self._sender, self._reader:
                self.wire.close()

    def _read(self, ready: Callable[[], bool], deadline: float | None) -> None:
        try:
            while True:
                if self._frame is None:
                    self._frame = self.wire.receiving(self.session.receives)
                soon = time.monotonic() + _PATIENCE_S
                try:
                    frame = drive(self.wire, self._frame, min(deadline or soon, soon), writing=False)
                except CallTimedOut:
                    frame = None  # it may be half read: this or the next reader goes on with it
                else:
                    self._frame = None
                with self.mutex:
                    if frame is not None and self.session.arrived(frame):
                        self._asked(frame)
                    del frame  # or its memory would be in use until the next one comes
                    self._wake_ready()
                    if ready() or (deadline is not None and time.monotonic() >= deadline):
                        return
        except (ConnectionError, ProtocolError) as e:
            self.fail(e)
        except BaseException as e:
            self.fail(ConnectionAbortedError(f"reading was interrupted ({e!r})"))
            raise
        finally:
            with self.mutex:
                self._reader.release()
                self._wake_one()

    def _wake_ready(self) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter.ready()]:
            self._waiters.remove(waiter)
            waiter.bell.release()

    def _wake_one(self) -> None:
        if self._waiters:
            self._waiters.popleft().bell.release()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConnectionLost("this connection was made before a fork; connect anew in the child", may_repeat=True)


class _Waiter:
    __slots__ = ("bell", "ready")

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.bell = threading.Lock()
        self.bell.acquire()


class BlockingStream:
    """`Stream` for threads: same messages, same window, same errors. One thread may send while another receives."""

    def __init__(self, link: BlockingConnection, flow: StreamState) -> None:
        self._link = link
        self._flow = flow
        self._order = threading.Lock()

    def send(
        self, params: Mapping[str, Any] | None = None, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None
    ) -> None:
        """Sends one message, once there is room for it; see `Stream.send`."""
        limits = self._link.wire.limits
        self._send(message(Kind.MESSAGE, self._flow.id, {"p": dict(params or {})}, buffers, limits=limits), timeout_s)

    def send_object(self, value: Any, *, timeout_s: float | None = None) -> None:
        """Like `send`, for anything that can be pickled."""
        limits = self._link.wire.limits
        self._send(object_message(Kind.MESSAGE, self._flow.id, {}, value, limits=limits), timeout_s)

    def receive(self, *, timeout_s: float | None = None) -> tuple[dict[str, Any], list[Any]]:
        """The next message; see `Stream.receive`."""
        frame = self._take(timeout_s)
        return frame.tag.get("p", {}), frame.buffers

    def receive_object(self, *, timeout_s: float | None = None) -> Any:
        """Like `receive`, for what `send_object` has sent."""
        return object_of(self._take(timeout_s), self._flow.receive)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        while True:
            try:
                message = self.receive()
            except StreamEnded:
                return
            yield message

    def end(self) -> None:
        """Says that this side sends no more; it can still receive."""
        with self._order:
            with self._link.mutex:
                said = self._flow.over or self._flow.ended
                self._flow.ended = True
            if not said:
                self._control(Kind.END, {})
        self._forget()

    def reset(self, error: BaseException | None = None) -> None:
        """Ends both directions at once; the other end's handler is told."""
        with self._link.mutex:
            over = self._flow.over
            self._flow.fail(StreamEnded("the stream was closed on this side"))
        if not over:
            self._control(Kind.RESET, fault(error or StreamEnded()))
        self._forget()

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reset(error)

    def _send(self, frame: FrameMessage, timeout_s: float | None) -> None:
        flow, departure, deadline = self._flow, SendState(), deadline_in(timeout_s)
        with self._order:
            if not self._link.wait(lambda: flow.may_send(frame.cost), deadline):
                raise CallTimedOut(f"no room on the stream within {timeout_s:g} s")
            with self._link.mutex:
                flow.sending(frame.cost)
            try:
                self._link.send(frame, departure, deadline=deadline)
            finally:
                if not departure.begun:
                    with self._link.mutex:
                        flow.unsent(frame.cost)

    def _take(self, timeout_s: float | None) -> Frame:
        if not self._link.wait(self._flow.may_take, deadline_in(timeout_s)):
            raise CallTimedOut(f"no message on the stream within {timeout_s:g} s")
        with self._link.mutex:
            frame, credit = self._flow.take()
        if credit:
            self._control(Kind.CREDIT, {"n": credit})
        return frame

    def _control(self, kind: Kind, tag: dict[str, Any]) -> None:
        frame = message(kind, self._flow.id, tag, limits=self._link.wire.limits)
        try:
            self._link.send(frame, SendState())
        except ConnectionLost:
            pass  # whoever reads notices, too, and fails what waits

    def _forget(self) -> None:
        with self._link.mutex:
            if self._flow.over:
                self._link.session.flows.pop(self._flow.id, None)
        self._link.nudge()


def drive(wire: FrameSocket, steps: Steps[Any], deadline: float | None, *, writing: bool) -> Any:
    """Resumes steps on a blocking socket until they are done.

    Raises:
        CallTimedOut: they are not at the deadline; they may be resumed.
    """
    while True:
        left = _left(deadline)
        wire.patience(left if 0 <= left < 0.9 * _PATIENCE_S else _PATIENCE_S, writing=writing)
        try:
            next(steps)
        except StopIteration as done:
            return done.value
        if deadline is not None and time.monotonic() >= deadline:
            raise CallTimedOut(f"the other end does not {'take' if writing else 'send'} a frame by the deadline")


def deadline_in(timeout_s: float | None) -> float | None:
    """The moment, on the monotonic clock."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline: float | None) -> float:
    return -1 if deadline is None else max(0.0, deadline - time.monotonic())
