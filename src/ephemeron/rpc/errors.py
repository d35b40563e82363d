"""What a call can raise besides `ConnectionError`."""

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
    """The bytes on the connection are no frame of ours, or exceed a limit. The connection is closed."""
