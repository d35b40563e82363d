"""The thread in which a session lives: in real time from the first task to the end, or in virtual time for what was submitted."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any
from weakref import WeakSet

from ephemeron import logs
from ephemeron.errors import EphemeronError, PlatformError
from ephemeron.executor import remains
from ephemeron.executor.graphs import Graph
from ephemeron.executor.kind import new_header
from ephemeron.executor.places import PlaceOptions, opened
from ephemeron.executor.programs import Launched, remove_program
from ephemeron.executor.session import Session, Submission
from ephemeron.functions import simulation
from ephemeron.functions.jsonl import unfinished
from ephemeron.runs.folders import RESULT_FILE, RunFolder, last_t
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.status import session_end
from ephemeron.runs.summary import write_summary
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

_QUIET_S = 0.02
"""Time without a new task after which those that were submitted are simulated."""


_open: WeakSet[Driver] = WeakSet()
"""Those of which a thread may run."""


def _close_all() -> None:
    for driver in list(_open):
        driver.close(cancel=not driver.is_closing)


# Before thread pools refuse work, as the pools of `concurrent.futures` themselves do: what `atexit` calls comes too late for functions to be ended.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class Driver(ABC):
    """Runs a session in a thread of its own, which starts with the first task.

    Args:
        session: to run.
        options: admitted.
        folder: of the run.
        name: of the executor.
        lock: of the run; closed at the end.
        secrets: of the channel.
        header: of a run that it goes on with; None: a new one.
        payload: of the header of a new run.
        launch: stores a run that is not to be run by this process, with its header and the variables of its channel.
    """

    def __init__(
        self,
        session: Session,
        options: PlaceOptions,
        *,
        folder: RunFolder,
        name: str,
        lock: IO[str],
        secrets: dict[str, str],
        header: RunHeader | None = None,
        payload: Mapping[str, object] | None = None,
        launch: Callable[[RunFolder, RunHeader, Mapping[str, str]], RunHeader] | None = None,
    ) -> None:
        self._session, self._options, self._folder, self._secrets = session, options, folder, secrets
        self._name, self._lock, self._header, self._launch = name, lock, header, launch
        self._payload = payload or {}
        self._is_launched = False
        self.is_closing = False
        """It ends when its tasks have results; no task comes any more."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """Why the session has ended early."""
        self._process = os.getpid()
        _open.add(self)

    def add(self, made: list[Submission]) -> None:
        """Hands tasks to the session.

        Raises:
            EphemeronError: the session has ended with this error.
        """
        self._begin()
        self._hand_over(lambda: self._session.add(made))

    def add_graph(self, graph: Graph) -> None:
        """Hands a graph to the session.

        Raises:
            EphemeronError: the session has ended with this error.
        """
        self._begin()
        self._hand_over(lambda: self._session.add_graph(graph))

    def _begin(self) -> None:
        if self._error is not None:
            raise self._error
        if self._process != os.getpid():
            raise RuntimeError(f"this executor is of process {self._process}, from which this one was forked; make one here")
        if self._thread is None:
            s = self._session
            header = self._header or new_header(
                self._folder,
                self._name,
                self._options,
                prices=s.meter.prices,
                budget_usd=s.budget_usd,
                labels=s.labels,
                payload=self._payload,
            )
            if self._launch is not None:
                write_header(self._folder, self._launch(self._folder, header, self._secrets))
                self._is_launched = True
                raise Launched
            (self._folder.path / RESULT_FILE).unlink(missing_ok=True)
            before_s = last_t(self._folder) if self._folder.events.exists() else 0.0
            if self._header is not None and (not before_s or session_end(self._folder.events) is not None):  # it begins, or was stopped
                header = replace(header, started_at=time.time() - before_s)
            write_header(self._folder, header)
            self._session.header = header
            self._thread = threading.Thread(target=self._body, name=f"ephemeron-{self._session.run}", daemon=True)
            self._thread.start()

    def close(self, *, cancel: bool, wait: bool = True) -> None:
        """Ends the session when its tasks have results, or now. The program ends after it.

        Args:
            cancel: cancel the tasks that have none.
            wait: return when all is ended.
        """
        self.is_closing = True
        if self._process != os.getpid():
            return
        if self._thread is None:
            _open.discard(self)
            self._lock.close()
            if not self._is_launched and self._header is None:
                shutil.rmtree(self._folder.path, ignore_errors=True)
            return
        if cancel:
            self._session.cancel_open()
        self._end()
        if wait:
            self._thread.join()
            _open.discard(self)

    @abstractmethod
    def wake(self) -> None:
        """Futures were cancelled. Any thread."""

    @abstractmethod
    def _hand_over(self, add: Callable[[], None]) -> None:
        """Calls `add`, and tells the session."""

    @abstractmethod
    def _end(self) -> None: ...

    @abstractmethod
    def _run(self) -> None:
        """In the thread: runs the session to its end."""

    def _body(self) -> None:
        try:
            with logs.context(run=self._session.run):
                self._run()
                asyncio.run(remains.remove_remains(self._folder.path.parent))  # other executors' channels live in real time
        except BaseException as e:  # noqa: BLE001 - every future tells it
            if isinstance(e, OSError) and e.strerror:  # no room, no right to write, too many open files
                e = PlatformError(f"the executor has failed: {e.strerror}{f' ({e.filename})' if e.filename else ''}")
            elif not isinstance(e, EphemeronError):
                _log.exception("the executor has failed")
                e = PlatformError(f"the executor has failed: {line_of(e)}")
            self._error = e
            self._session.fail(e)
        finally:
            with self._lock, contextlib.suppress(OSError):
                summary = self._session.summary(self._error)
                write_summary(self._folder, summary)
                if summary.status != "stopped" or self._header is None:  # else another process goes on with what is there
                    remove_program(self._folder)

    async def _live(self) -> None:
        async with opened(self._options, run=self._session.run, folder=self._folder.path, secrets=self._secrets) as place:
            await self._session.live(place, running=[] if self._header is None else unfinished(self._folder.events)[0])


class LiveDriver(Driver):
    """In real time."""

    _loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._session.wake)

    def _hand_over(self, add: Callable[[], None]) -> None:
        add()
        self.wake()
        if self._error is not None:  # it has ended meanwhile
            self._session.fail(self._error)

    def _end(self) -> None:
        self._session.close()
        self.wake()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            try:
                await self._live()
            finally:
                self._loop = None

        asyncio.run(main())


class VirtualDriver(Driver):
    """In virtual time, in rounds: what was submitted runs to its end, on functions and a store of its own."""

    def __init__(self, session: Session, options: PlaceOptions, **details: Any) -> None:
        super().__init__(session, options, **details)
        self._new = threading.Condition()
        self._ends = False

    def wake(self) -> None:
        pass  # a round sees cancelled futures by itself

    def _hand_over(self, add: Callable[[], None]) -> None:
        add()
        with self._new:
            self._new.notify()

    def _end(self) -> None:
        with self._new:
            self._ends = True
            self._new.notify()

    def _run(self) -> None:
        self._session.close()  # each round ends with its tasks
        while self._wait():
            simulation.run(self._live())

    def _wait(self) -> bool:
        """Waits for tasks, and a little for more of them. Returns whether there are any."""
        with self._new:
            while not self._session.has_arrived and not self._ends:
                self._new.wait()
            while not self._ends and self._new.wait(_QUIET_S):
                pass
        return self._session.has_arrived


def driver_of(platform: str) -> Callable[..., Driver]:
    """The driver for a platform."""
    return VirtualDriver if platform == "simulated" else LiveDriver
