"""Parameter server process of one run on this machine: it is started before the functions and ended after them."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ephemeron.config import own_processes
from ephemeron.errors import ChannelUnreachable

_log = logging.getLogger(__name__)

IDLE_EXIT_S = 60.0
"""Seconds without a connected function after which the server ends by itself, because its client may have died."""
STOP_S = 5.0
"""Seconds that a server may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server."""

    address: str
    token: str
    pid: int

    def stop(self, *, grace_s: float = STOP_S) -> None:
        """Ends it, by force where it does not end within `grace_s` seconds. Does nothing when it has ended."""
        if not _is_server(self.pid):
            return
        try:
            os.kill(self.pid, signal.SIGTERM)
            end = time.monotonic() + grace_s
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    _log.warning("killing the parameter server, process %d, which has not ended in %g s", self.pid, grace_s)
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.02)
        except (ProcessLookupError, ChildProcessError):
            pass


def _is_server(pid: int) -> bool:
    """Whether a process is a parameter server: the number of one that has ended may be another process's by now."""
    try:
        return own_processes.module_of("parameter-server").encode() in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except FileNotFoundError:
        return not Path("/proc/self/cmdline").exists()


def start(folder: Path, *, wait_s: float = 20.0) -> ServerProcess:
    """Starts a server on a free loopback port and keeps its address and token in a file only we can read.

    Raises:
        ChannelUnreachable: it did not start.
    """
    token, announce = secrets.token_urlsafe(24), folder / "server.address"
    announce.unlink(missing_ok=True)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            own_processes.command("parameter-server", "--announce", str(announce), "--idle-exit-s", str(IDLE_EXIT_S)),
            env={**os.environ, "EPHEMERON_CHANNEL_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    end = time.monotonic() + wait_s
    while not announce.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise ChannelUnreachable(f"the parameter server did not start; see {folder / 'server.log'}")
        time.sleep(0.02)
    host, port = announce.read_text().split()
    _log.info("parameter server started at %s:%s, process %d", host, port, process.pid)
    server = ServerProcess(f"ps://{host}:{port}", token, process.pid)
    secret = folder / "server.json"
    secret.touch(mode=0o600)
    secret.write_text(json.dumps({"address": server.address, "token": token, "pid": server.pid}))
    return server


def known(folder: Path) -> ServerProcess | None:
    """The server that a client has started for this run; it may have ended since."""
    try:
        return ServerProcess(**json.loads((folder / "server.json").read_text()))
    except FileNotFoundError:
        return None
