"""uvicorn's HTTP protocol with limits on clients that do not send a whole request: it has none of its own before the first one.

A connection without a complete request ends after a while (slow heads, slow bodies, silence), and counts as unproved until its first
one is complete (`communication.unproved`). What is then asked without the token is refused by `access`, which closes the connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ephemeron.communication.unproved import UnprovedConnections, origin

REQUEST_S = 10.0
"""For a whole request to arrive: from the connection, or from the end of the one before."""


def limited_protocol(unproved: UnprovedConnections, *, request_s: float = REQUEST_S) -> type[asyncio.Protocol]:
    """A class for `uvicorn.Config(http=…)`, whose instances share `unproved`."""

    class LimitedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._settle = unproved.admit(origin(transport.get_extra_info("socket")), transport.abort)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._settle()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.transport.is_closing():
                return
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._unwatch()
                self._settle()
            elif self._timer is None:
                self._timer = self.loop.call_later(request_s, self.transport.abort)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return _as_protocol(LimitedProtocol)


def _as_protocol(cls: Any) -> type[asyncio.Protocol]:
    return cls  # type: ignore[no-any-return]
