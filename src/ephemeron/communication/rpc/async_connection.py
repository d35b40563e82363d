"""The asyncio engine of both ends: one connection, many tasks that send, one that reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from ephemeron.communication.rpc.frame import Buffer, Frame, FrameMessage, Kind, message
from ephemeron.communication.rpc.frame_socket import FrameSocket, Steps
from ephemeron.communication.rpc.objects import object_message, object_of
from ephemeron.communication.rpc.session import SendState, Session, StreamState, fault
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, StreamEnded

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
        """Set when a call or a stream of ours is over."""
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(self, frame: FrameMessage, departure: SendState, *, flush_s: float) -> None:
        """Sends one frame.

        A frame once begun must be finished, or no other can follow it. So who is cancelled here first waits until
        his bytes have left, and the connection is broken if the other end does not take them within `flush_s`.

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
        """Receives until the connection is lost, and says why in `session.lost`. What wants a handler is `asked`."""
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
        """Breaks the connection; whatever waits fails."""
        self.session.fail(cause)
        self.wire.interrupt()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs something that ends with the connection."""
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


class AsyncStream:
    """Messages both ways, in order, beside all calls and other streams of the connection.

    A sender waits while the window that the other end has opened for this stream is full; nobody else does.
    One task may send while another receives.
    """

    def __init__(self, peer: AsyncConnection, flow: StreamState, *, flush_s: float) -> None:
        self._peer = peer
        self._flow = flow
        self._flush_s = flush_s
        self._bell = asyncio.Event()
        self._order = asyncio.Lock()
        flow.notify = self._bell.set

    async def send(
        self, params: Mapping[str, Any] | None = None, buffers: Sequence[Buffer] = (), *, timeout_s: float | None = None
    ) -> None:
        """Sends one message, once there is room for it.

        Raises:
            CallTimedOut: there was no room in time; nothing was sent.
            StreamEnded: this side was ended, or the other end has closed the stream.
            RemoteError, ConnectionLost: the other end failed, or is gone.
            ProtocolError: too large.
        """
        limits = self._peer.wire.limits
        await self._send(
            message(Kind.MESSAGE, self._flow.id, {"p": dict(params or {})}, buffers, limits=limits), timeout_s
        )

    async def send_object(self, value: Any, *, timeout_s: float | None = None) -> None:
        """Like `send`, for anything that can be pickled."""
        limits = self._peer.wire.limits
        await self._send(object_message(Kind.MESSAGE, self._flow.id, {}, value, limits=limits), timeout_s)

    async def receive(self, *, timeout_s: float | None = None) -> tuple[dict[str, Any], list[Any]]:
        """The next message.

        Raises:
            CallTimedOut: none came in time.
            StreamEnded: the other end has sent all.
            RemoteError, ConnectionLost: the other end failed, or is gone; what came before is received first.
        """
        frame = await self._take(timeout_s)
        return frame.tag.get("p", {}), frame.buffers

    async def receive_object(self, *, timeout_s: float | None = None) -> Any:
        """Like `receive`, for what `send_object` has sent."""
        return object_of(await self._take(timeout_s), self._flow.receive)

    async def __aiter__(self) -> AsyncIterator[tuple[dict[str, Any], list[Any]]]:
        while True:
            try:
                message = await self.receive()
            except StreamEnded:
                return
            yield message

    async def end(self) -> None:
        """Says that this side sends no more; it can still receive."""
        async with self._order:
            if not self._flow.over and not self._flow.ended:
                self._flow.ended = True
                await self._control(Kind.END, {})
        self._forget()

    async def reset(self, error: BaseException | None = None) -> None:
        """Ends both directions at once; the other end's handler is cancelled."""
        if not self._flow.over:
            failure = error or StreamEnded("the stream is closed")
            self._flow.fail(StreamEnded("the stream was closed on this side"))
            await self._control(Kind.RESET, fault(failure))
        self._forget()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.reset(error)

    async def _send(self, frame: FrameMessage, timeout_s: float | None) -> None:
        departure = SendState()
        async with timed(timeout_s, "no room on the stream"), self._order:
            await self._until(lambda: self._flow.may_send(frame.cost))
            self._flow.sending(frame.cost)
            try:
                await self._peer.send(frame, departure, flush_s=self._flush_s)
            finally:
                if not departure.begun:
                    self._flow.unsent(frame.cost)

    async def _take(self, timeout_s: float | None) -> Frame:
        async with timed(timeout_s, "no message on the stream"):
            await self._until(self._flow.may_take)
        frame, credit = self._flow.take()
        if credit:
            self._peer.start(self._control(Kind.CREDIT, {"n": credit}))
        return frame

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._bell.clear()
            await self._bell.wait()

    async def _control(self, kind: Kind, tag: dict[str, Any]) -> None:
        frame = message(kind, self._flow.id, tag, limits=self._peer.wire.limits)
        try:
            await self._peer.send(frame, SendState(), flush_s=self._flush_s)
        except ConnectionLost:
            pass  # the reader notices, too, and fails what waits

    def _forget(self) -> None:
        if self._flow.over:
            self._peer.session.flows.pop(self._flow.id, None)
            self._peer.freed.set()


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
