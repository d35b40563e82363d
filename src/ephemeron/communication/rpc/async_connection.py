"""Asyncio engine of both ends: one connection, many tasks that send, one that reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ephemeron.communication.rpc.frame import Frame, FrameMessage
from ephemeron.communication.rpc.frame_socket import FrameSocket, Steps
from ephemeron.communication.rpc.session import SendState, Session
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError

T = TypeVar("T")

_FAIR = 8
"""Frames read in a row before other tasks have a turn."""


class AsyncConnection:
    """One end of a connection on an event loop.

    Args:
        wire: greeted; owned from now on.
        session: its tables.
    """

    def __init__(self, wire: FrameSocket, session: Session) -> None:
        self.wire = wire
        self.session = session
        self.freed = asyncio.Event()
        """Set when a call of this end is over."""
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(self, frame: FrameMessage, departure: SendState, *, flush_s: float) -> None:
        """Sends one frame.

        A frame once begun must be finished, or no other can follow it. So a cancelled task first waits until
        its bytes have left, and the connection is broken if the other end does not take them within `flush_s`.

        Raises:
            ConnectionLost: the other end is gone; the frame has not left in full.
        """
        if self.session.lost is not None:
            raise self.session.loss(may_repeat=True)
        await self._sending.acquire()
        steps = self.wire.sending(frame)
        departure.begun = True
        try:
            next(steps)
        except StopIteration:
            departure.left = True
            self._sending.release()
            return
        except ConnectionError as e:
            self._sending.release()
            raise ConnectionLost(f"connection lost: {e}", may_repeat=True) from e
        except BaseException:
            self._sending.release()
            raise
        rest = self.start(self._finish(steps, departure))
        try:
            await asyncio.shield(rest)
        except ConnectionError as e:
            raise ConnectionLost(f"connection lost: {e}", may_repeat=True) from e
        except asyncio.CancelledError:
            if not rest.done() and not (await asyncio.wait({rest}, timeout=flush_s))[0]:
                self.fail(ConnectionResetError("the other end does not take a frame"))
                rest.cancel()
            raise

    async def read(self, asked: Callable[[Frame], None]) -> None:
        """Receives until the connection is lost; `session.lost` has the reason. Requests are passed to `asked`."""
        try:
            while True:
                for _ in range(_FAIR):
                    frame = await drive(self.wire, self.wire.receiving(self.session.receives), writing=False)
                    if self.session.arrived(frame):
                        asked(frame)
                    del frame  # or its memory would be in use until the next one comes
                await asyncio.sleep(0)
        except (ConnectionError, ProtocolError) as e:
            self.fail(e)

    def fail(self, cause: Exception) -> None:
        """Breaks the connection; all waits fail."""
        self.session.fail(cause)
        self.wire.interrupt()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a task that ends with the connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, why: str) -> None:
        """Breaks the connection and waits for all that was started."""
        self.fail(ConnectionResetError(why))
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.wire.close()

    async def _finish(self, steps: Steps[None], departure: SendState) -> None:
        try:
            await _ready(self.wire, writing=True)
            await drive(self.wire, steps, writing=True)
            departure.left = True
        finally:
            self._sending.release()


async def drive(wire: FrameSocket, steps: Steps[T], *, writing: bool) -> T:
    """Resumes steps whenever the socket is ready, until they are done."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await _ready(wire, writing=writing)


@asynccontextmanager
async def timed(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """`CallTimedOut` after so many seconds."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            yield
    except TimeoutError as e:
        if not deadline.expired() or isinstance(e, CallTimedOut):
            raise
        raise CallTimedOut(f"{what} within {timeout_s:g} s") from e


async def _ready(wire: FrameSocket, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    handle = wire.sock.fileno()
    if handle < 0:
        raise ConnectionResetError("the connection is closed")
    future = loop.create_future()
    if writing:
        loop.add_writer(handle, _wake, future)
    else:
        loop.add_reader(handle, _wake, future)
    try:
        await future
    finally:
        if writing:
            loop.remove_writer(handle)
        else:
            loop.remove_reader(handle)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
