"""A part of the service as a process: `python -m ephemeron.data.service.process KIND FOLDER`, started by `daemon.ManagedProcess`.

It shuts down on SIGTERM, and by itself when it is not needed any more.

Shutdown of a process by a signal or by a thread of its own.

A `threading.Event` would deadlock: a signal handler that sets it while the main thread holds its lock waits for ever.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from ephemeron import logs
from ephemeron.data.service.daemon import ProcessLock
from ephemeron.data.service.settings import TOKEN_VARIABLE, Endpoint, RouterSettings, ServiceSettings, ShardSettings

_HELD: list[ProcessLock] = []
"""Locks until this process has ended, with all its threads: as soon as one is free, the next process may be started."""
_log = logging.getLogger(__name__)


class Served(Protocol):
    """A coordinator, router or shard."""

    endpoint: Endpoint

    def close(self) -> None:
        """Shuts down."""


def main() -> None:
    """Serves until a signal or the part itself ends it."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    logs.configure()
    try:
        lock = ProcessLock(folder)
    except BlockingIOError:
        return  # another process was faster
    _HELD.append(lock)
    over = ShutdownSignal()
    with logs.context(part=kind):
        served = _make(kind, lock, os.environ[TOKEN_VARIABLE], over.set)
        lock.announce(served.endpoint.address)
        _log.info("%s in %s listens at %s", kind, folder, served.endpoint.address)
        over.wait()
        lock.withdraw()
        served.close()
        _log.info("%s in %s has ended", kind, folder)


def _make(kind: str, lock: ProcessLock, token: str, on_end: Callable[[], None]) -> Served:
    if kind == "shard":
        from ephemeron.data.service.shard import Shard

        return Shard(lock.settings(ShardSettings), lock.folder, token, on_end)
    if kind == "router":
        from ephemeron.data.service.router import Router

        return Router(lock.settings(RouterSettings), lock.folder, token, on_end)
    if kind == "coordinator":
        from ephemeron.data.service.coordinator import Coordinator

        return Coordinator(lock.settings(ServiceSettings), lock.folder, token, on_end)
    raise ValueError(f"{kind!r} is not a part of the service")


# -- shutdown of a process by a signal or by a thread of its own --------------------------------------------------


class ShutdownSignal:
    """Set by SIGTERM, SIGINT, or `set`. Made and waited for in the main thread.

    Args:
        signals: that end the process; their handlers are replaced.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write)
        for number in signals:
            signal.signal(number, _noted)

    def set(self) -> None:
        """Ends the wait; from any thread."""
        with suppress(BlockingIOError):  # the pipe is full of signals
            os.write(self._write, b"!")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits; whether it has been set."""
        return bool(select.select([self._read], [], [], timeout_s)[0])


def _noted(number: int, frame: FrameType | None) -> None:
    """Handler without effect: Python writes to the pipe for every signal with a handler."""


if __name__ == "__main__":
    main()
