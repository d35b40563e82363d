"""Addresses of the parts of the service: one for this machine and for others.

Every part listens on a Unix socket and on TCP. Clients on the same machine use the Unix socket, with large data in shared memory;
all others use TCP.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ephemeron.communication.rpc import BlockingClient, BlockingHandler, BlockingServer, FrameLimits, Options
from ephemeron.errors import JobError, ProtocolError, ServiceRefused, ServiceUnreachable, TokenRefused

TOKEN_VARIABLE = "EPHEMERON_DATA_TOKEN"
"""Environment variable that passes the token on: it is never in an argument, a settings file or a log."""
OPTIONS = Options(limits=FrameLimits(max_frame=2 << 30, max_buffers=1 << 17, max_tag=16 << 20), shared_bytes=1 << 30)
"""Limits for large batches of many samples, several of which are in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """Address of one process."""

    unix: str
    """Path of the Unix socket; empty: there is none."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> ServiceAddress:
        """The address that `HOST:PORT` names.

        Raises:
            JobError: the text has another form.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal():
            raise JobError(f"address {text!r} of a data service", remedy="write HOST:PORT")
        return cls(unix="", host=host.strip("[]"), port=int(port))

    def connect(self, token: str, *, timeout_s: float = 5.0) -> BlockingClient:
        """A connection: by the Unix socket where it exists, else by TCP.

        Raises:
            ServiceRefused: the service has another token.
            ServiceUnreachable: no answer before the deadline.
        """
        try:
            if self.unix and os.path.exists(self.unix):
                with contextlib.suppress(ConnectionError):
                    return BlockingClient.connect_shared(self.unix, token=token, timeout_s=timeout_s, options=OPTIONS)
            return BlockingClient.connect_tcp(self.host, self.port, token=token, timeout_s=timeout_s, options=OPTIONS)
        except TokenRefused as e:
            raise ServiceRefused(
                f"the data service at {self} refuses this token; give the one that it was started with "
                f"(token=…, or the variable {TOKEN_VARIABLE})"
            ) from e
        except (OSError, ProtocolError) as e:  # ConnectionError is an OSError
            raise ServiceUnreachable(f"no data service answers at {self} within {timeout_s:g} s ({e})") from e


class Endpoint:
    """A server on a Unix socket and on TCP.

    Args:
        handler: answers calls, in threads.
        token: secret that callers have to prove.
        host: address to listen on.
        port: port to listen on; 0: any free one.
        allow_remote: whether `host` may be reachable from other machines.
    """

    def __init__(self, handler: BlockingHandler, *, token: str, host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> None:
        self.server = BlockingServer(handler, token=token, options=OPTIONS, max_threads=256)
        where, number = self.server.listen_tcp(host, port, allow_remote=allow_remote)
        # Not in the state folder: the path of a Unix socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ephemeron-")) if hasattr(socket, "AF_UNIX") else None
        path = "" if self._folder is None else str(self._folder / "socket")
        if path:
            self.server.listen_unix(path)
        self.address = ServiceAddress(unix=path, host=_reachable(where), port=number)

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self.server.close()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def _reachable(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
