"""Blocking engine of both ends: one connection, many threads, and no thread that only reads.

A waiting thread reads, if no other one does, and hands out frames for other threads. When it has its own, the next waiting
thread goes on, in the middle of a frame if need be. So a single caller sends and receives in its own thread, without a
switch, and 2.5 MB are received with one system call. The threads of a server work alike: they wait for a request.

A connection belongs to the process that made it: a forked child's copy is closed at once, and using it raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ephemeron.communication.rpc.frame import Frame, FrameMessage
from ephemeron.communication.rpc.frame_socket import FrameSocket, Steps
from ephemeron.communication.rpc.session import SendState, Session
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError

_FLUSH_S = 5.0
_POLL_TIMEOUT_S = 1.0
"""Longest time of a thread in one system call, unless its deadline is earlier."""


class BlockingConnection:
    """One end of a connection, for any number of threads.

    Args:
        wire: blocking and greeted; owned from now on.
        session: its tables; to be touched under `mutex` only.
        asked: called, under `mutex`, with a request; must not wait.
    """

    def __init__(self, wire: FrameSocket, session: Session, asked: Callable[[Frame], None] = lambda frame: None) -> None:
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
                        self._wake_one()  # this thread may have been the next reader
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
        """Breaks the connection; all waits fail."""
        with self.mutex:
            self.session.fail(cause)
            self.wire.interrupt()
            while self._waiters:
                self._wake_one()

    def nudge(self) -> None:
        """Wakes threads that have become ready by a change of the session."""
        with self.mutex:
            self._wake_ready()

    def close(self, why: str) -> None:
        """Breaks the connection, and closes the socket when no thread uses it any more."""
        if os.getpid() == self._process:
            self.fail(ConnectionAbortedError(why))
            with self._sender, self._reader:
                self.wire.close()

    def _read(self, ready: Callable[[], bool], deadline: float | None) -> None:
        try:
            while True:
                if self._frame is None:
                    self._frame = self.wire.receiving(self.session.receives)
                soon = time.monotonic() + _POLL_TIMEOUT_S
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


def drive(wire: FrameSocket, steps: Steps[Any], deadline: float | None, *, writing: bool) -> Any:
    """Resumes steps on a blocking socket until they are done.

    Raises:
        CallTimedOut: they are not at the deadline; they may be resumed.
    """
    while True:
        left = _left(deadline)
        wire.set_timeout(left if 0 <= left < 0.9 * _POLL_TIMEOUT_S else _POLL_TIMEOUT_S, writing=writing)
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
