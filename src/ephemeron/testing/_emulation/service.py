"""An HTTP service in a thread with an event loop of its own, on loopback unless its owner has another network."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ephemeron.communication.direct.transport import LOOPBACK
from ephemeron.communication.rpc.http import Handler, listen


class ReservedPort:
    """A port that the system gives to no other process, until it is closed; refuses connections until the server listens there.

    A port that is looked up and let go may be given to any process before the server listens, even to the connection that asks
    whether it answers, which then answers itself. On Linux a socket that is bound and does not listen prevents that, and lets a
    server listen at its address that sets SO_REUSEADDR, as those of asyncio, Go, Werkzeug and Valkey do.
    """

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("127.0.0.1", 0))
        self.number = int(self._sock.getsockname()[1])
        if sys.platform != "linux":  # elsewhere the server could not listen
            self.close()

    def close(self) -> None:
        """Lets the port go."""
        self._sock.close()


_kept: list[ReservedPort] = []


def free_port() -> int:
    """A port that is reserved as long as this process lives."""
    _kept.append(ReservedPort())
    return _kept[-1].number


@dataclass
class FaultConfig:
    """Counts of calls that are to fail, counted down."""

    deliver_twice: int = 0
    """Asynchronous calls that are delivered twice, at once, as when a queue's acknowledgement is lost."""
    throttle: int = 0
    """Requests that are refused with 429."""
    lose: int = 0
    """Calls that are accepted and never run, as when a queue that is kept in memory ends."""

    def take(self, name: str) -> bool:
        """Whether the next call has this fault; counts it down."""
        left: int = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


class EmulatorTasks:
    """Tasks that no caller waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Starts a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancels all tasks, and waits for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


T = TypeVar("T")

_START_S = 120.0
_log = logging.getLogger(__name__)


class EmulatedService(ABC):
    """Base of the emulators. A context manager; ends with its processes when the context is left, or with its process.

    Args:
        name: of the thread and of the temporary folder.
        port: 0: a free one.
        host: address of this machine at which it listens.
    """

    def __init__(self, name: str, port: int, host: str = LOOPBACK) -> None:
        self._name, self._port, self.host = name, port, host
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Event()
        self._problem: BaseException | None = None

    @property
    def url(self) -> str:
        """Address of the service."""
        return f"http://{self.host}:{self._port}"

    @property
    @abstractmethod
    def faults(self) -> FaultConfig:
        """Faults of the next calls; touched on the loop only."""

    @abstractmethod
    def _handler(self) -> Handler:
        """Answers requests."""

    @abstractmethod
    async def _work(self) -> None:
        """Runs beside the server until it is cancelled."""

    @abstractmethod
    async def _end(self) -> None:
        """Ends queues and processes."""

    def start(self) -> Self:
        """Returns when the service listens.

        Raises:
            OSError: the port is taken.
        """
        self._thread.start()
        self._started.wait(_START_S)
        if self._problem is not None:
            raise self._problem
        return self

    def close(self) -> None:
        """Ends all processes and the service."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def deliver_twice(self, calls: int = 1) -> None:
        """Delivers each of the next asynchronous calls twice."""
        self._set_fault("deliver_twice", calls)

    def throttle(self, requests: int = 1) -> None:
        """Refuses the next calls with 429."""
        self._set_fault("throttle", requests)

    def _set_fault(self, name: str, count: int) -> None:
        self._loop.call_soon_threadsafe(setattr, self.faults, name, count)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(listen(self._handler(), host=self.host, port=self._port))
            self._port = server.port
        except OSError as e:
            self._problem = e
            return
        finally:
            self._started.set()
        _log.info("%s listens on %s", self._name, self.url)
        work = self._loop.create_task(self._work())
        try:
            self._loop.run_forever()
        finally:
            work.cancel()
            self._loop.run_until_complete(asyncio.gather(work, return_exceptions=True))
            self._loop.run_until_complete(server.close())
            self._loop.run_until_complete(self._end())
            self._loop.close()
            _log.info("%s has ended", self._name)
