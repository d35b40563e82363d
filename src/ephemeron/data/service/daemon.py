"""Processes of the service: started, found again by whoever comes later, ended.

A part of the service outlives the one that started it: a router that was killed must not take its shards along. So each
part writes where it listens into its folder, holds a lock there while it lives, and whoever wants it looks there first.
The lock's file says whose it is: what a dead process has left behind is thereby told from what a living one has said.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ephemeron.communication.rpc import BlockingClient
from ephemeron.data.service.address import TOKEN_VARIABLE, ServiceAddress
from ephemeron.errors import ServiceUnreachable

Kind: TypeAlias = Literal["coordinator", "router", "shard"]
START_S = 30.0
TRIES = 20
"""To take a lock that others look at for a moment."""
_SETTINGS, _READY, _LOCK, _LOG = "settings.json", "ready.json", "lock", "log"


class ManagedProcess:
    """A process of the service, from outside.

    Args:
        kind: what it is.
        folder: its own.
        token: shared secret of the service.
    """

    def __init__(self, kind: Kind, folder: Path, token: str) -> None:
        self.kind, self.folder, self._token = kind, folder, token
        self._client: BlockingClient | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs, whoever started it."""
        if self._process is not None:
            self._process.poll()  # or it would stay a zombie, which is no matter to the lock
        return (self.folder / _LOCK).exists() and _held(self.folder / _LOCK)

    def address(self) -> ServiceAddress:
        """Where it listens.

        Raises:
            ServiceUnreachable: it does not run.
        """
        if self.alive and (ready := self._ready()) is not None:
            return ready
        raise ServiceUnreachable(f"the {self.kind} in {self.folder} does not run")

    def ensure(self, settings: Mapping[str, Any]) -> ServiceAddress:
        """Where it listens; started, with these settings, if it does not run.

        Raises:
            ServiceUnreachable: it does not start; says why.
        """
        end, started = time.monotonic() + START_S, False
        while True:
            with contextlib.suppress(ServiceUnreachable):
                found = self.address()
                if self._process is not None and self._process.pid != self._pid():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(
                            max(0.0, end - time.monotonic())
                        )  # another one was faster: it goes by itself
                return found
            last = self._pid()  # before we look whether it lives, or it might be the next one's
            if not self.alive and not self._is_starting():
                if started and self._process is not None and self._process.poll() != 0:  # 0: another one was faster
                    raise ServiceUnreachable(f"the {self.kind} does not start: {self._last_words()}")
                self._clear(last)
                try:
                    self._start(settings)
                except OSError as e:
                    raise ServiceUnreachable(f"the {self.kind} cannot be started: {e}") from e
                started = True
            if time.monotonic() > end:
                raise ServiceUnreachable(f"the {self.kind} does not answer within {START_S:g} s: {self._last_words()}")
            time.sleep(0.01)

    def settings(self) -> dict[str, Any] | None:
        """What it was started with, if it runs."""
        with contextlib.suppress(OSError, ValueError):
            if self.alive:
                loaded: dict[str, Any] = json.loads((self.folder / _SETTINGS).read_text())
                return loaded
        return None

    def call(self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """Asks it something.

        Raises:
            ServiceUnreachable, ConnectionLost, CallTimedOut: it does not run, died meanwhile, or does not answer.
            RemoteError: it refuses.
        """
        if self._client is None or not self._client.connected:
            self._client = self.address().connect(self._token, timeout_s=timeout_s)
        reply, _ = self._client.call(method, params or {}, timeout_s=timeout_s)
        return reply

    def forget(self) -> None:
        """Ends the connection, not the process."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def kill(self, *, wait_s: float = 10.0, gently: bool = False) -> None:
        """Ends it, with what it has started if it is gone in good order."""
        self.forget()
        end = time.monotonic() + wait_s
        if gently and self.alive:
            self._signal(signal.SIGTERM)
            while self.alive and time.monotonic() < end:
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        while self.alive and time.monotonic() < end:
            time.sleep(0.01)
            self._signal(signal.SIGKILL)  # somebody else's may have come in its place
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self.alive and (pid := self._pid()) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _pid(self) -> int | None:
        """Of the process that holds the lock, or was the last to hold it."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / _LOCK).read_text())
        return None

    def _is_starting(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self, settings: Mapping[str, Any]) -> None:
        self.forget()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / _SETTINGS, dict(settings))
        with (self.folder / _LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ephemeron.data.service.process", self.kind, str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env={**os.environ, **_whole_paths(), TOKEN_VARIABLE: self._token},
            )  # fmt: skip

    def _ready(self) -> ServiceAddress | None:
        """What the process that holds the lock has announced, and not one before it."""
        with contextlib.suppress(OSError, ValueError):
            said = json.loads((self.folder / _READY).read_text())
            if said["pid"] == self._pid():
                return ServiceAddress.from_dict(said["address"])
        return None

    def _clear(self, dead: int | None) -> None:
        """Removes the socket of one that was killed."""
        with contextlib.suppress(OSError, ValueError):
            said = json.loads((self.folder / _READY).read_text())
            if said["pid"] == dead and said["address"]["unix"]:
                place = Path(said["address"]["unix"])
                place.unlink(missing_ok=True)
                place.parent.rmdir()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.folder / _LOG).read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "it said nothing"
        return "it said nothing"


class ProcessLock:
    """That this process is the part in its folder: a lock while it lives, and where it listens.

    Raises:
        BlockingIOError: another process is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # perhaps somebody was just looking whether it is held
                if not left:
                    raise
                time.sleep(0.01)
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()

    def settings(self) -> dict[str, Any]:
        """What it was started with."""
        loaded: dict[str, Any] = json.loads((self.folder / _SETTINGS).read_text())
        return loaded

    def announce(self, address: ServiceAddress) -> None:
        """From now on others find it."""
        write_json(self.folder / _READY, {"pid": os.getpid(), "address": address.to_dict()})

    def withdraw(self) -> None:
        (self.folder / _READY).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, and for this user only."""
    part = path.with_suffix(f".{secrets.token_hex(6)}.part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(value))
    part.replace(path)


def _whole_paths() -> dict[str, str]:
    """Where modules are, for a process in another folder."""
    found = os.environ.get("PYTHONPATH")
    return {} if not found else {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, found.split(os.pathsep)))}


def _held(lock: Path) -> bool:
    """Whether somebody lives there. Those who look share the lock: two at a time must not take each other for it."""
    try:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
