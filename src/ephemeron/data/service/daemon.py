"""Processes of the service: started, found by later clients, ended.

A part of the service outlives the process that started it: a router that was killed must not take its shards along. So each
part writes its address into its folder and holds a lock there while it is alive, and clients look there first. The lock file
names its process, which distinguishes the announcement of a running process from that of a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from ephemeron.communication.rpc import BlockingClient
from ephemeron.config import own_processes
from ephemeron.config.paths import DATASETS_STORE, datasets_store
from ephemeron.config.typed import build, plain
from ephemeron.data.service.protocol import Method
from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceAddress
from ephemeron.errors import JobError, ServiceUnreachable

Kind: TypeAlias = Literal["coordinator", "router", "shard"]
START_S = 30.0
TRIES = 20
"""Attempts to take a lock that other processes test for a moment."""
_SETTINGS, _READY, _LOCK, LOG_FILE = "settings.json", "ready.json", "lock", "log"
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Settings = TypeVar("Settings")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The process of a part, and its address (`ready.json`)."""

    pid: int
    address: ServiceAddress


class ManagedProcess:
    """A process of the service, seen by its clients.

    Args:
        kind: of the process.
        folder: of the process.
        token: shared secret of the service.
    """

    def __init__(self, kind: Kind, folder: Path, token: str) -> None:
        self.kind, self.folder, self._token = kind, folder, token
        self._client: BlockingClient | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs, also if another process started it."""
        if self._process is not None:
            self._process.poll()  # else it would stay a zombie; the lock does not depend on it
        return (self.folder / _LOCK).exists() and _held(self.folder / _LOCK)

    def address(self) -> ServiceAddress:
        """The address of the process.

        Raises:
            ServiceUnreachable: it does not run.
        """
        if self.alive and (ready := self._announced()) is not None and ready.pid == self._pid():
            return ready.address
        raise ServiceUnreachable(f"the {self.kind} in {self.folder} does not run")

    def ensure(self, settings: object) -> ServiceAddress:
        """The address of the process, which is started if it does not run.

        Args:
            settings: a dataclass, or a mapping of its fields; used if the process has to be started.

        Raises:
            ServiceUnreachable: it does not start; the message has its last line.
        """
        end, started = time.monotonic() + START_S, False
        while True:
            with contextlib.suppress(ServiceUnreachable):
                found = self.address()
                if self._process is not None and self._process.pid != self._pid():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(max(0.0, end - time.monotonic()))  # another was faster, so it ends by itself
                return found
            last = self._pid()  # read before `alive`, or it might be that of the next process
            if not self.alive and not self._is_starting():
                if started and self._process is not None and self._process.poll() != 0:  # 0: another process was faster
                    raise ServiceUnreachable(f"the {self.kind} does not start: {self._last_log_line()}")
                self._clear(last)
                try:
                    self._start(settings)
                except OSError as e:
                    raise ServiceUnreachable(f"the {self.kind} cannot be started: {e}") from e
                started = True
            if time.monotonic() > end:
                raise ServiceUnreachable(f"the {self.kind} does not answer within {START_S:g} s: {self._last_log_line()}")
            time.sleep(0.01)

    def settings(self) -> object:
        """The JSON document of settings that the process was started with; None if it does not run."""
        with contextlib.suppress(OSError, ValueError):
            if self.alive:
                found: object = json.loads((self.folder / _SETTINGS).read_text())
                return found
        return None

    def call(self, method: Method[Request, Reply], request: Request, *, timeout_s: float) -> Reply:
        """Calls a method of the process.

        Raises:
            ServiceUnreachable, ConnectionLost, CallTimedOut: it does not run, died meanwhile, or does not answer.
            RemoteError: the handler raised.
        """
        if self._client is None or not self._client.connected:
            self._client = self.address().connect(self._token, timeout_s=timeout_s)
        return method.call(self._client, request, timeout_s=timeout_s)[0]

    def forget(self) -> None:
        """Closes the connection; the process goes on."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def kill(self, *, wait_s: float = 10.0, gently: bool = False) -> None:
        """Ends the process. If it shuts down on request (`gently`), the processes that it has started end with it."""
        self.forget()
        if self.alive:
            _log.info("%s in %s is ended (process %s)", self.kind, self.folder, self._pid())
        end = time.monotonic() + wait_s
        if gently and self.alive:
            self._signal(signal.SIGTERM)
            while self.alive and time.monotonic() < end:
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        while self.alive and time.monotonic() < end:
            time.sleep(0.01)
            self._signal(signal.SIGKILL)  # another client may have started the next one
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self.alive and (pid := self._pid()) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _pid(self) -> int | None:
        """Id of the process that holds the lock, or was the last to hold it."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / _LOCK).read_text())
        return None

    def _is_starting(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self, settings: object) -> None:
        self.forget()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _SETTINGS, settings)
        with (self.folder / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                own_processes.command("data-service", self.kind, str(self.folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={**os.environ, **_whole_paths(), TOKEN_VARIABLE: self._token},
            )
        _log.info("%s in %s is started (process %d)", self.kind, self.folder, self._process.pid)

    def _announced(self) -> Announcement | None:
        """The announcement in the folder, whether of a process that runs or of one that is dead."""
        with contextlib.suppress(OSError, ValueError, JobError):
            path = self.folder / _READY
            return build(Announcement, json.loads(path.read_text()), where=str(path))
        return None

    def _clear(self, dead: int | None) -> None:
        """Removes the socket of a process that was killed."""
        found = self._announced()
        if found is not None and found.pid == dead and found.address.unix:
            place = Path(found.address.unix)
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
                place.parent.rmdir()

    def _last_log_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "its log is empty"
        return "it has no log"


class ProcessLock:
    """The lock that makes this process the part in its folder, held while it is alive.

    Raises:
        BlockingIOError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # perhaps another process is testing whether it is held
                if not left:
                    raise
                time.sleep(0.01)
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()

    def settings(self, cls: type[Settings]) -> Settings:
        """The settings that this process was started with.

        Raises:
            JobError: the document is not of this class.
        """
        path = self.folder / _SETTINGS
        return build(cls, json.loads(path.read_text()), where=str(path))

    def announce(self, address: ServiceAddress) -> None:
        """Publishes the address of this process."""
        write_json(self.folder / _READY, Announcement(pid=os.getpid(), address=address))

    def withdraw(self) -> None:
        """Removes the published address."""
        (self.folder / _READY).unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Writes a dataclass or JSON value: atomically, and readable by this user only."""
    part = path.with_suffix(f".{secrets.token_hex(6)}.part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(plain(value) if is_dataclass(value) else value))
    part.replace(path)


def _whole_paths() -> dict[str, str]:
    """Variables with absolute paths, for a process in another folder: PYTHONPATH, and the store of datasets."""
    found = os.environ.get("PYTHONPATH")
    paths = {} if not found else {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, found.split(os.pathsep)))}
    return {**paths, DATASETS_STORE: datasets_store()}


def _held(lock: Path) -> bool:
    """Whether a process holds the lock. Tests take it shared, so that two tests at a time do not see each other."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
