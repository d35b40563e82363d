"""The process of a local daemon: `python -m ephemeron.functions.daemon_process SETTINGS`, or `… early FD`.

An early daemon (`early_daemon`) has no run yet. It starts the fork server and the function processes that its client asks for, and
serves the run whose settings come last. It ends if the client closes the connection before.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ephemeron import logs
from ephemeron.communication.rpc import Server
from ephemeron.config.typed import build
from ephemeron.functions.cgroups import UNENFORCED, Enforcement, detect
from ephemeron.functions.daemon_messages import (
    EARLY,
    HOST_FILE,
    LOCK_FILE,
    LOGS_FOLDER,
    PRIVATE,
    DaemonAddress,
    DaemonSettings,
    EarlyRequest,
    FunctionsWanted,
    remove_remains,
    short_folder,
    write_private,
)
from ephemeron.functions.fork_server import Forks
from ephemeron.functions.function_process import FunctionProcess, with_threads
from ephemeron.functions.hosted_run import function_environment
from ephemeron.functions.local_daemon import LocalDaemon

_log = logging.getLogger("ephemeron.functions.daemon_process")  # this module runs as `__main__`

_HOST_LOG = "host.log"


class EarlyStart:
    """What a daemon has before it has a run: control groups, a fork server, and function processes that were begun.

    Args:
        folder: for the output of these processes until there is a run; their HOME is below it.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self._logs = folder / LOGS_FOLDER
        self._logs.mkdir()
        self._folder = folder
        self._env = function_environment(os.environ, self.home)
        self.enforcement = detect()
        self.enforcement.clean()
        self.forks = Forks.make(self._logs)
        if self.forks is not None:
            self.forks.begin(with_threads(self._env, 1.0))
        self.begun: list[FunctionProcess] = []
        self._numbered = 0

    async def begin(self, wanted: FunctionsWanted) -> None:
        """Starts functions, in place of those of another quota."""
        others = [f for f in self.begun if f.memory_mb != wanted.memory_mb]
        self.begun = [f for f in self.begun if f.memory_mb == wanted.memory_mb]
        while len(self.begun) < wanted.count:
            self._numbered += 1
            function = FunctionProcess(
                self.enforcement,
                self._numbered,
                memory_mb=wanted.memory_mb,
                vcpus=wanted.limits.vcpus(wanted.memory_mb),
                env=self._env,
                folder=self._folder,
                forks=self.forks,
            )
            function.begin()
            self.begun.append(function)
        await asyncio.gather(*(f.dispose() for f in others))

    def move_output(self, run_dir: Path) -> None:
        """Makes the output of processes part of the run's, also what they are still to write where the file system allows it."""
        (run_dir / LOGS_FOLDER).mkdir(exist_ok=True)
        for file in self._logs.iterdir():
            with contextlib.suppress(FileExistsError):
                try:
                    os.link(file, run_dir / LOGS_FOLDER / file.name)
                except OSError:
                    shutil.copyfile(file, run_dir / LOGS_FOLDER / file.name)

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(f.dispose() for f in self.begun))
        if self.forks is not None:
            await self.forks.close()


async def serve(settings: DaemonSettings, ready: Callable[[], None], *, private: Path, early: EarlyStart | None = None) -> None:
    """Runs a daemon until it is told to end, or has nothing left to do.

    Args:
        settings: of the run.
        ready: called once clients can connect.
        private: folder of the daemon's own, for its socket.
        early: what was started before there was a run.
    """
    folder = settings.folder
    if early is None:
        enforcement = detect() if settings.enforce else Enforcement(kind="none", unenforced=UNENFORCED)
        enforcement.clean()
        forks = Forks.make(folder / LOGS_FOLDER) if settings.forks else None
    else:
        enforcement, forks = early.enforcement, early.forks
    daemon = LocalDaemon(
        folder,
        settings.limits,
        enforcement,
        idle_s=settings.idle_s,
        linger_s=settings.linger_s,
        forks=forks,
        spare=settings.spare,
        begun=() if early is None else early.begun,
        home=None if early is None else early.home,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    daemon.close_unfinished()
    remove_remains(folder)
    token = secrets.token_urlsafe(32)
    server = Server(daemon.handle, token=token)
    socket_path = os.path.join(private, "host")
    await server.listen_unix(socket_path)
    daemon.address = DaemonAddress(pid=os.getpid(), socket=socket_path, token=token)
    write_private(folder / HOST_FILE, daemon.address)
    tending = asyncio.create_task(daemon.tend(lambda: server.connections))
    try:
        ready()
        _log.info("the daemon of %s is ready: quotas by %s, %s", folder, enforcement.kind, "forks" if forks else "no forks")
        await daemon.stopping.wait()
    finally:
        await daemon.close()
        tending.cancel()
        (folder / HOST_FILE).unlink(missing_ok=True)
        await server.close()


async def _serve_early(client: socket.socket, until_end: contextlib.ExitStack) -> None:
    """Starts what the client asks for, then serves its run. The run's lock is released with `until_end`."""
    name = f"{EARLY}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=name, dir=short_folder(), ignore_cleanup_errors=True) as private:
        early = EarlyStart(Path(private))
        settings: DaemonSettings | None = None
        try:
            async for request in _requests(client):
                if request.functions is not None:
                    await early.begin(request.functions)
                settings = request.run
            if settings is None:
                return  # the client has refused the run, or was killed
            with (settings.folder / _HOST_LOG).open("ab") as log:
                os.dup2(log.fileno(), 2)
            lock = until_end.enter_context((settings.folder / LOCK_FILE).open("ab"))
            if not _locked(lock.fileno()):
                return _answer(client, b"taken\n")
            early.move_output(settings.folder)
            await serve(settings, lambda: _answer(client, b"ready\n"), private=Path(private), early=early)
        finally:
            await early.close()


async def _requests(client: socket.socket) -> AsyncIterator[EarlyRequest]:
    """Requests of the client, up to the settings of its run."""
    reader, writer = await asyncio.open_connection(sock=client.dup())
    try:
        while line := await reader.readline():
            request = build(EarlyRequest, json.loads(line), where="request to an early daemon")
            yield request
            if request.run is not None:
                return
    finally:
        writer.close()


def _answer(client: socket.socket, word: bytes) -> None:
    with client:
        client.setblocking(True)
        client.sendall(word)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def main() -> None:
    """Detaches from the client and serves; the client is told `ready`, or `taken` where the run has another daemon."""
    logs.configure()
    early = sys.argv[1] == "early"
    settings = None if early else build(DaemonSettings, json.loads(sys.argv[1]), where="settings of the daemon")
    if os.fork():
        os._exit(0)  # the daemon becomes a child of init, and the client has no child to wait for
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if settings is None:
        client = socket.socket(fileno=int(sys.argv[2]))
        client.set_inheritable(False)
        with contextlib.ExitStack() as until_end:
            asyncio.run(_serve_early(client, until_end))
        return
    with (settings.folder / LOCK_FILE).open("ab") as lock, tempfile.TemporaryDirectory(prefix=PRIVATE, dir=short_folder()) as private:
        if not _locked(lock.fileno()):
            _say("taken")
            return
        asyncio.run(serve(settings, lambda: _say("ready"), private=Path(private)))


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode())
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    main()
