"""A local daemon that starts before its run has a folder, while the client prepares the run.

A client needs a second or two until a run can be launched: it imports PyTorch, loads samples and tries the model. In this time an
early daemon makes the imports of functions in its fork server, and begins function processes of the quota that the run will have:

    with early_daemon(daemon_environment({})):
        want_functions(memory_mb=704, count=4, limits=limits)
        ...                                   # prepare the run; `LocalPlatform.start` makes the early daemon the run's

A daemon that is launched inside with the same environment variables is the early one; otherwise it ends with the context. Nothing is
written into a run's folder before, so a run that is refused leaves nothing. Its client alone knows of it: a client that is killed
takes it along. A function process that was begun is as cold as any other: no code but the imports has run in it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

from ephemeron.config import own_processes
from ephemeron.config.typed import plain
from ephemeron.functions.base import Limits
from ephemeron.functions.daemon_messages import DaemonSettings, EarlyRequest, FunctionsWanted

_log = logging.getLogger(__name__)
_MOST_PER_CORE = 4
"""Function processes that are begun per core: a refused run wastes no more than their start."""


class EarlyDaemon:
    """The client's side of one early daemon. It is starting when this returns.

    Args:
        env: environment variables of the daemon and of its functions.

    Raises:
        OSError: no process can be made.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                command = own_processes.command("daemon", "early", str(theirs.fileno()))
                self._process = subprocess.Popen(
                    command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError:
            self._connection.close()
            raise

    def want(self, *, memory_mb: int, count: int, limits: Limits) -> None:
        """Asks for function processes of a quota, in place of those of another one."""
        count = min(count, _MOST_PER_CORE * (os.cpu_count() or 1))
        self._send(EarlyRequest(functions=FunctionsWanted(memory_mb=memory_mb, count=count, limits=limits)))

    def serve(self, settings: DaemonSettings, *, timeout_s: float) -> str:
        """Makes it the daemon of a run. Blocks.

        Returns:
            `ready`; `taken`: the run has another one; empty: it does not answer.
        """
        self._send(EarlyRequest(run=settings))
        word = ""
        with contextlib.suppress(OSError):
            if select.select([self._connection], [], [], timeout_s)[0]:
                word = self._connection.recv(64).decode().strip()
        self.close()
        return word

    def close(self) -> None:
        """Lets go of it: it ends, unless it serves a run."""
        self._connection.close()
        self._process.kill()  # its first process, where the daemon is not detached yet; else the daemon ends with the connection
        self._process.wait()

    def _send(self, request: EarlyRequest) -> None:
        with contextlib.suppress(OSError):  # it has ended: `serve` will say so
            self._connection.sendall(json.dumps(plain(request)).encode() + b"\n")


_lock = threading.Lock()
_waiting: list[EarlyDaemon] = []
"""Those that no run has taken yet."""
_around: ContextVar[EarlyDaemon | None] = ContextVar("ephemeron_early_daemon", default=None)


@contextlib.contextmanager
def early_daemon(env: Mapping[str, str]) -> Iterator[None]:
    """Inside, an early daemon is there for the next run with these environment variables, unless an enclosing context has one.

    Where functions are not forked, or no process can be made, nothing is done in advance.
    """
    around = _around.get()
    if around is not None and around.env == env and around in _waiting:
        yield
        return
    if sys.platform != "linux" or os.environ.get("EPHEMERON_FORKS") == "0":
        yield
        return
    try:
        early = EarlyDaemon(env)
    except OSError as e:
        _log.info("no daemon is started in advance: %s", e)
        yield
        return
    _waiting.append(early)
    token = _around.set(early)
    try:
        yield
    finally:
        _around.reset(token)
        if _taken(early):
            early.close()


def want_functions(*, memory_mb: int, count: int, limits: Limits) -> None:
    """Tells the early daemon of the enclosing context, if there is one, which functions its run will start."""
    early = _around.get()
    if early is not None and early in _waiting:
        early.want(memory_mb=memory_mb, count=count, limits=limits)


def waiting_daemon(env: Mapping[str, str]) -> EarlyDaemon | None:
    """An early daemon with these environment variables, which is the caller's from here on; None: there is none."""
    with _lock:
        found = next((early for early in _waiting if early.env == env), None)
        if found is not None:
            _waiting.remove(found)
        return found


def _taken(early: EarlyDaemon) -> bool:
    """Takes it; False: it was taken before."""
    with _lock:
        if early not in _waiting:
            return False
        _waiting.remove(early)
        return True
