"""Ports of loopback for servers that have to be told one."""

from __future__ import annotations

import socket
import sys


class ReservedPort:
    """A port that the system gives to no other process, until it is closed; refuses connections until the server listens there.

    A port that is looked up and let go may be given to any process before the server listens, even to the connection that asks
    whether it answers, which then answers itself. On Linux a socket that is bound and does not listen prevents that, and lets a
    server listen at its address that sets SO_REUSEADDR, as those of asyncio, Go, Werkzeug and Valkey do.
    """

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("127.0.0.1", 0))
        self.number = int(self._sock.getsockname()[1])
        if sys.platform != "linux":  # elsewhere the server could not listen
            self.close()

    def close(self) -> None:
        """Lets the port go."""
        self._sock.close()


_kept: list[ReservedPort] = []


def free_port() -> int:
    """A port that is reserved as long as this process lives."""
    _kept.append(ReservedPort())
    return _kept[-1].number
