"""State of one end of a connection: its own calls and those of the other end. Frames in, decisions out.

No I/O, no threads, no clock: the asyncio and the blocking interface each drive one of these, so that both behave alike.
As in DPFlow (section 4.3.1), a table leads from each request to its waiting caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ephemeron.communication.rpc.frame import Buffer, Frame, FrameLimits, FrameMessage, Kind, Receive, Tag, message
from ephemeron.communication.rpc.objects import object_message
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError
from ephemeron.user_code import text_of


class CallRequest(NamedTuple):
    """A call: parameters and buffers, or an object."""

    method: str
    params: Mapping[str, Any]
    buffers: Sequence[Buffer] = ()
    value: Any = None
    is_object: bool = False

    def message(self, kind: Kind, id: int, *, limits: FrameLimits, timeout_s: float | None = None) -> FrameMessage:
        """The frame; see `frame.message` for what it raises."""
        tag: Tag = {"m": self.method, "p": dict(self.params)}
        if timeout_s is not None:
            tag["t"] = timeout_s
        if self.is_object:
            return object_message(kind, id, tag, self.value, limits=limits)
        return message(kind, id, tag, self.buffers, limits=limits)


class SendState:
    """Progress of a frame that is sent."""

    def __init__(self) -> None:
        self.begun = False
        """Part of it may have left."""
        self.left = False
        """It has left in full. Until then the other end cannot have acted on it."""


class PendingCall(SendState):
    """A call of this end that waits for its answer."""

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
            CallTimedOut: the server noticed the deadline first.
            ConnectionLost: no reply will come.
        """
        if self.failure is not None:
            raise self.failure
        assert self.frame is not None
        if self.frame.kind is Kind.ERROR:
            error = remote_error(self.frame)
            raise CallTimedOut(error.text) if error.type == CallTimedOut.__name__ else error
        return self.frame


class Session:
    """The tables of one end. Not thread-safe.

    Args:
        client: whether this end calls and the other answers.
        max_calls: concurrent calls of the client.
        receive: type of the buffers of requests.
    """

    def __init__(self, *, client: bool, max_calls: int, receive: Receive = Receive.VIEWS) -> None:
        self.lost: Exception | None = None
        """Why the connection is lost; None: it is not."""
        self.answers: dict[int, PendingCall] = {}
        self.running: dict[int, Callable[[], None]] = {}
        """Functions that cancel the handlers of the other end's calls."""
        self._client = client
        self.max_calls = max_calls
        self._receive = receive
        self._ids = itertools.count(1)

    @property
    def busy(self) -> bool:
        """Whether the other end answers as many calls as it accepts at once."""
        return len(self.answers) >= self.max_calls and self.lost is None

    def next_id(self) -> int:
        """Number of a new call."""
        return next(self._ids)

    def receives(self, kind: Kind, id: int) -> Receive:
        """Type of the buffers of a frame."""
        if kind is Kind.REPLY:
            answer = self.answers.get(id)
            return answer.receive if answer else Receive.VIEWS
        return self._receive

    def arrived(self, frame: Frame) -> bool:
        """Takes in a frame. True if it is a call, which needs a handler.

        Raises:
            ProtocolError: the other end must not send this.
        """
        match frame.kind:
            case Kind.REQUEST if not self._client:
                self._asked(frame)
                return True
            case Kind.CANCEL if not self._client:
                self._cancel(frame.id)
            case Kind.REPLY | Kind.ERROR if self._client:
                answer = self.answers.pop(frame.id, None)
                if answer is not None:
                    answer.frame = frame
                    answer.notify()
            case _:
                who = "client" if self._client else "server"
                raise ProtocolError(f"a {who} is not sent frames of kind {frame.kind.name}")
        return False

    def fail(self, cause: Exception) -> None:
        """Marks the connection as lost; all waits end with an error."""
        if self.lost is None:
            self.lost = cause
        for answer in self.answers.values():
            answer.failure = self.loss(may_repeat=not answer.left)
            answer.notify()
        for cancel in list(self.running.values()):
            cancel()
        self.answers.clear()
        self.running.clear()

    def loss(self, *, may_repeat: bool) -> ConnectionLost:
        """The error of a call."""
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
        if frame.id in self.running:
            raise ProtocolError(f"request {frame.id} is under way already")
        if len(self.running) >= self.max_calls:
            raise ProtocolError(f"more than max_calls = {self.max_calls} calls at once; raise it at the server")


def remote_error(frame: Frame) -> RemoteError:
    """The error in an ERROR frame."""
    return RemoteError(str(frame.tag.get("type", "Error")), str(frame.tag.get("text", "")))


def fault(error: BaseException) -> Tag:
    """The tag of an ERROR frame."""
    return {"type": type(error).__name__, "text": text_of(error)}


def deadline_of(frame: Frame) -> float | None:
    """Timeout of a request, in seconds; None: it has none."""
    left = frame.tag.get("t")
    return float(left) if isinstance(left, int | float) and 0 <= left < 1e9 else None
