"""A part of the service as a process: `python -m ephemeron.data.service.process KIND FOLDER`, started by `daemon.ManagedProcess`.

It shuts down on SIGTERM, and by itself when it is not needed any more.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ephemeron import logs
from ephemeron.data.service.address import TOKEN_VARIABLE, Endpoint
from ephemeron.data.service.daemon import ProcessLock
from ephemeron.data.service.settings import RouterSettings, ServiceSettings, ShardSettings
from ephemeron.data.service.shutdown import ShutdownSignal

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


if __name__ == "__main__":
    main()
