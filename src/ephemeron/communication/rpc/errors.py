"""What a call or a stream can raise.

EphemeronError
├── RemoteError                  the handler at the other end raised
├── TokenRefused                 the two ends do not share a token
├── ProtocolError                a frame is damaged or exceeds a limit; the connection is closed
├── StreamEnded                  the stream has no more messages, or takes none
├── CallTimedOut                 (also a TimeoutError) no answer before the deadline
└── ConnectionLost               (also a ConnectionError) the other end is gone; says whether to repeat
"""

from __future__ import annotations

from ephemeron.errors import EphemeronError


class RemoteError(EphemeronError):
    """The handler at the other end raised.

    Args:
        type_name: name of the exception's class over there; kept as `type`.
        text: its text; kept as `text`.
    """

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(f"{type_name}: {text}" if text else type_name)
        self.type = type_name
        self.text = text


class TokenRefused(EphemeronError):
    """The two ends do not share the same token."""


class ProtocolError(EphemeronError):
    """The bytes on the connection are no frame of ours, or exceed a limit. The connection is closed.

    Raised before anything is sent where it is our own frame that exceeds a limit; the connection stays then.
    """


class StreamEnded(EphemeronError):
    """There are no more messages to receive, or this side has said that it sends no more."""


class CallTimedOut(EphemeronError, TimeoutError):
    """No answer before the deadline. The other end has been told and cancels; it may have done the work."""


class ConnectionLost(EphemeronError, ConnectionError):
    """The connection ended before the answer came.

    Args:
        message: why.
        may_repeat: True if the request never left in full, so its handler cannot have run; kept as `may_repeat`.
    """

    def __init__(self, message: str, *, may_repeat: bool) -> None:
        super().__init__(message)
        self.may_repeat = may_repeat
