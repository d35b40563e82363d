"""A part of the service as a process: `python -m ephemeron.data.service.process KIND FOLDER`, started by `daemon.ManagedProcess`.

Ends on SIGTERM in good order, and by itself when nobody needs it any more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ephemeron.data.service.address import TOKEN_VARIABLE, Endpoint
from ephemeron.data.service.daemon import ProcessLock
from ephemeron.data.service.shutdown import ShutdownSignal
from ephemeron.data.service.timeouts import ServiceTimeouts

if TYPE_CHECKING:
    from ephemeron.data.service.shard import ShardSettings


_HELD: list[ProcessLock] = []
"""Locks until this process has ended, threads and all: as soon as one is free, the next process may be started."""


class Served(Protocol):
    """What a part has to have."""

    endpoint: Endpoint

    def close(self) -> None:
        """Ends it."""


def main() -> None:
    """Serves until told to stop."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    try:
        presence = ProcessLock(folder)
    except BlockingIOError:
        return  # another one was faster
    _HELD.append(presence)
    over = ShutdownSignal()
    served = _make(kind, presence, os.environ[TOKEN_VARIABLE], over.set)
    presence.announce(served.endpoint.address)
    over.wait()
    presence.withdraw()
    served.close()


def _make(kind: str, presence: ProcessLock, token: str, ending: Callable[[], None]) -> Served:
    settings = presence.settings()
    if kind == "shard":
        from ephemeron.data.service.shard import Shard

        return Shard(_of_shard(settings), presence.folder, token, ending)
    if kind == "router":
        from ephemeron.data.service.router import Router, RouterSettings

        settings["whole"] = _of_shard(settings["whole"])
        return Router(RouterSettings(**settings), presence.folder, token, ending)
    if kind == "coordinator":
        from ephemeron.data.service.coordinator import Coordinator, ServiceSettings

        settings["patience"] = ServiceTimeouts(**settings["patience"])
        return Coordinator(ServiceSettings(**settings), presence.folder, token, ending)
    raise ValueError(f"no part of the service is a {kind!r}")


def _of_shard(told: dict[str, Any]) -> ShardSettings:
    from ephemeron.data.service.shard import ShardSettings

    return ShardSettings(**{**told, "paths": tuple(told["paths"]), "patience": ServiceTimeouts(**told["patience"])})


if __name__ == "__main__":
    main()
