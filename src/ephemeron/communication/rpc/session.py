"""What one end of a connection knows: its calls, their callers' calls and the streams. Frames in, decisions out.

No I/O, no threads, no clock: the asyncio face and the blocking face each drive one of these, and so both mean the
same. DPFlow (section 4.3.1) keeps one table from request to waiting caller and one from stream to its channels;
here each stream has a window besides, without which a slow reader of one stream fills the memory of its process or,
if reading stops instead, holds up all others on the connection.

A stream's window: a sender may have `window` bytes under way that have not been taken from the stream at the other
end. A message counts for its bytes, but for half a window at most, or a large one could never go. Space is given
back once half a window has been taken, so one frame in the other direction serves many messages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ephemeron.communication.rpc.frame import Buffer, Frame, FrameLimits, FrameMessage, Kind, Receive, message
from ephemeron.communication.rpc.objects import object_message
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError, StreamEnded


class CallRequest(NamedTuple):
    """What is asked: parameters and buffers, or an object."""

    method: str
    params: Mapping[str, Any]
    buffers: Sequence[Buffer] = ()
    value: Any = None
    is_object: bool = False

    def message(self, kind: Kind, id: int, *, limits: FrameLimits, timeout_s: float | None = None) -> FrameMessage:
        """The frame; see `frame.message` for what it raises."""
        tag: dict[str, Any] = {"m": self.method, "p": dict(self.params)}
        if timeout_s is not None:
            tag["t"] = timeout_s
        if self.is_object:
            return object_message(kind, id, tag, self.value, limits=limits)
        return message(kind, id, tag, self.buffers, limits=limits)


class SendState:
    """How far a frame of ours has come."""

    def __init__(self) -> None:
        self.begun = False
        """Whether part of it may have left."""
        self.left = False
        """Whether it has left in full: what has not cannot have been acted upon."""


class PendingCall(SendState):
    """A call of ours that waits for its answer."""

    def __init__(self, receive: Receive, notify: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.receive = receive
        self.notify = notify
        self.frame: Frame | None = None
        self.failure: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises, and does not wait."""
        return self.frame is not None or self.failure is not None

    def result(self) -> Frame:
        """The reply.

        Raises:
            RemoteError: the handler raised.
            CallTimedOut: the server saw the deadline pass before we did.
            ConnectionLost: there will be none.
        """
        if self.failure is not None:
            raise self.failure
        assert self.frame is not None
        if self.frame.kind is Kind.ERROR:
            error = remote_error(self.frame)
            raise CallTimedOut(error.text) if error.type == CallTimedOut.__name__ else error
        return self.frame


class StreamState:
    """One stream as one end sees it.

    Args:
        id: its number on the connection.
        window: bytes that we take before they are read here.
        peer_window: bytes that the other end takes.
        receive: which type its messages have.
        notify: called when something has changed.
    """

    def __init__(
        self, id: int, *, window: int, peer_window: int, receive: Receive, notify: Callable[[], None] = lambda: None
    ) -> None:
        self.id = id
        self.receive = receive
        self.notify = notify
        self.failure: Exception | None = None
        """Why nothing can be sent or received any more."""
        self.ended = False
        """Whether we have said that we send no more."""
        self._window, self._peer_window = window, peer_window
        self._unread: deque[Frame] = deque()
        self._out = self._in = self._taken = 0
        self._peer_ended = False

    @property
    def over(self) -> bool:
        """Whether the stream can be forgotten: both sides have ended, or it failed."""
        return self.failure is not None or (self.ended and self._peer_ended)

    @property
    def unread_bytes(self) -> int:
        """Bytes of messages that have come and were not taken."""
        return sum(frame.cost for frame in self._unread)

    def may_send(self, cost: int) -> bool:
        """Whether `sending` would return or raise, and not exceed the window."""
        return _fits(self._out, cost, self._peer_window) or self.ended or self.failure is not None

    def sending(self, cost: int) -> None:
        """A message is about to leave.

        Raises:
            StreamEnded: we have ended it, or the other end has closed it.
            RemoteError, ConnectionLost: it failed.
        """
        if self.failure is not None:
            raise self.failure
        if self.ended:
            raise StreamEnded("this side of the stream was ended")
        self._out += cost

    def unsent(self, cost: int) -> None:
        """That message did not leave after all."""
        self._out -= cost

    def may_take(self) -> bool:
        """Whether `take` would return or raise, and not wait."""
        return bool(self._unread) or self._peer_ended or self.failure is not None

    def take(self) -> tuple[Frame, int]:
        """The next message, and the bytes to give back to the sender (0: none yet).

        Raises:
            StreamEnded: the other end has sent all.
            RemoteError, ConnectionLost: it failed; what came before can still be taken.
        """
        if not self._unread:
            raise self.failure or StreamEnded("the other end has ended the stream")
        frame = self._unread.popleft()
        self._taken += frame.cost
        if 2 * self._taken < self._window or self._peer_ended:
            return frame, 0
        credit, self._taken = self._taken, 0
        self._in -= credit
        return frame, credit

    def arrived(self, frame: Frame) -> None:
        """Takes in one of this stream's frames.

        Raises:
            ProtocolError: the other end does not keep to the window, or goes on after its end.
        """
        match frame.kind:
            case Kind.MESSAGE:
                if self._peer_ended or not _fits(self._in, frame.cost, self._window):
                    raise ProtocolError(f"stream {frame.id}: a message of {frame.cost} bytes beyond window or end")
                self._in += frame.cost
                self._unread.append(frame)
            case Kind.CREDIT:
                credit = frame.tag.get("n")
                if not isinstance(credit, int) or not 0 < credit <= self._out:
                    raise ProtocolError(f"stream {frame.id}: {credit!r} bytes given back of {self._out}")
                self._out -= credit
            case Kind.END:
                self._peer_ended = True
            case Kind.RESET:
                error = remote_error(frame)
                closed = error.type == StreamEnded.__name__
                self.fail(StreamEnded("the other end has closed the stream") if closed else error)
        self.notify()

    def fail(self, failure: Exception) -> None:
        """Nothing more will come or go; what has come can be taken."""
        self.failure = self.failure or failure
        self.notify()


class Session:
    """The tables of one end. Not thread-safe.

    Args:
        client: whether this end calls; the other answers.
        window, peer_window: see `StreamState`.
        max_calls: calls and streams under way at once, of the one that calls.
        receive: type of what comes with requests and streams of the other end.
    """

    def __init__(
        self, *, client: bool, window: int, peer_window: int, max_calls: int, receive: Receive = Receive.VIEWS
    ) -> None:
        self.lost: Exception | None = None
        """Why the connection is no more."""
        self.answers: dict[int, PendingCall] = {}
        self.running: dict[int, Callable[[], None]] = {}
        """How to cancel the handlers of the other end's calls."""
        self.flows: dict[int, StreamState] = {}
        self._client = client
        self._window, self._peer_window = window, peer_window
        self.max_calls = max_calls
        self._receive = receive
        self._ids = itertools.count(1)

    @property
    def busy(self) -> bool:
        """Whether the other end answers as many calls of ours as it will."""
        return len(self.answers) + len(self.flows) >= self.max_calls and self.lost is None

    def next_id(self) -> int:
        """A number for a call or stream of ours."""
        return next(self._ids)

    def flow(self, id: int, receive: Receive) -> StreamState:
        """A new stream."""
        self.flows[id] = StreamState(id, window=self._window, peer_window=self._peer_window, receive=receive)
        return self.flows[id]

    def receives(self, kind: Kind, id: int) -> Receive:
        """Which type the buffers of a frame get."""
        if kind is Kind.REPLY:
            answer = self.answers.get(id)
            return answer.receive if answer else Receive.VIEWS
        flow = self.flows.get(id) if kind is Kind.MESSAGE else None
        return flow.receive if flow else self._receive

    def arrived(self, frame: Frame) -> bool:
        """Takes in a frame. True if it is a call or a stream that wants a handler.

        Raises:
            ProtocolError: the other end must not send this.
        """
        match frame.kind:
            case Kind.REQUEST | Kind.OPEN if not self._client:
                self._asked(frame)
                return True
            case Kind.CANCEL if not self._client:
                self._cancel(frame.id)
            case Kind.REPLY | Kind.ERROR if self._client:
                answer = self.answers.pop(frame.id, None)
                if answer is not None:
                    answer.frame = frame
                    answer.notify()
            case Kind.MESSAGE | Kind.CREDIT | Kind.END | Kind.RESET:
                flow = self.flows.get(frame.id)
                if flow is not None:  # it may have been forgotten here while this was under way
                    flow.arrived(frame)
                if frame.kind is Kind.RESET:
                    self._cancel(frame.id)
            case _:
                who = "client" if self._client else "server"
                raise ProtocolError(f"a {who} is not sent frames of kind {frame.kind.name}")
        return False

    def fail(self, cause: Exception) -> None:
        """The connection is lost: whatever waits learns it."""
        if self.lost is None:
            self.lost = cause
        for answer in self.answers.values():
            answer.failure = self.loss(may_repeat=not answer.left)
            answer.notify()
        for flow in list(self.flows.values()):
            flow.fail(self.loss(may_repeat=False))
        for cancel in list(self.running.values()):
            cancel()
        self.answers.clear()
        self.flows.clear()
        self.running.clear()

    def loss(self, *, may_repeat: bool) -> ConnectionLost:
        """The error for one who wanted an answer."""
        error = ConnectionLost(f"connection lost: {self.lost}", may_repeat=may_repeat)
        error.__cause__ = self.lost
        return error

    def _cancel(self, id: int) -> None:
        cancel = self.running.pop(id, None)
        if cancel is not None:
            cancel()

    def _asked(self, frame: Frame) -> None:
        if not isinstance(frame.tag.get("m"), str) or not isinstance(frame.tag.get("p", {}), dict):
            raise ProtocolError("a request names no method")
        if frame.id in self.running or frame.id in self.flows:
            raise ProtocolError(f"request {frame.id} is under way already")
        if len(self.running) >= self.max_calls:
            raise ProtocolError(f"more than max_calls = {self.max_calls} calls at once; raise it at the server")


def remote_error(frame: Frame) -> RemoteError:
    """What an ERROR or RESET frame says."""
    return RemoteError(str(frame.tag.get("type", "Error")), str(frame.tag.get("text", "")))


def _fits(used: int, cost: int, window: int) -> bool:
    return used + min(cost, window // 2) <= window


def fault(error: BaseException) -> dict[str, Any]:
    """The tag of an ERROR or RESET frame."""
    return {"type": type(error).__name__, "text": str(error)[:4_000]}


def deadline_of(frame: Frame) -> float | None:
    """Seconds that the caller of a request is willing to wait."""
    left = frame.tag.get("t")
    return float(left) if isinstance(left, int | float) and 0 <= left < 1e9 else None
