"""The kind `service`: what `ephemeron serve` keeps alive, as a run of the process that serves.

A service is a coroutine with a `ServiceRun`, by name in the table of `runs.kinds`. It reads its settings from the payload of the header,
says when it is ready, and serves until it is asked to end: by a signal, by `ephemeron stop` (a file in the run's folder), or by
itself. So the same coroutine serves when it is started and when it is resumed. No secret is in the header: a token is in a
file that it names, or in an environment variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from ephemeron import blocking
from ephemeron.blocking import Interrupts
from ephemeron.config.typed import build
from ephemeron.errors import JobError, UserError
from ephemeron.events import Event
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.client_run import STOP_FILE, STOP_LOOK_S, ClientRun, conclude, living
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following, RunKind, find_service
from ephemeron.runs.lock import driving, is_driven, owner
from ephemeron.runs.summary import RunResult, RunSummary, write_summary

_KILLED_S = 10.0
"""Seconds in which a killed process has to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSummary(RunSummary):
    """`result.json` of a service."""

    counters: Mapping[str, float] = field(default_factory=dict)
    """What it has done, by name; of its latest start."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a service says when it is ready, and at its end."""

    text: str
    document: Mapping[str, object]
    """The same for programs."""


@dataclass(slots=True)
class ServiceRun:
    """A service that is being served."""

    run: ClientRun
    over: asyncio.Event
    """Set when it is to end."""
    private: Mapping[str, str]
    """Settings that are not written down; empty where it is resumed."""
    on_ready: Callable[[Said], None]

    @property
    def header(self) -> RunHeader:
        """Of the run."""
        return self.run.header

    @property
    def folder(self) -> RunFolder:
        """Of the run."""
        return self.run.folder

    def ready(self, said: Said, *, address: str, payload: Mapping[str, Any]) -> None:
        """Says that clients can come.

        Args:
            said: for its user.
            address: at which they reach it.
            payload: settings with which it has the same address when it is started again.
        """
        self.run.update(channel=address, payload=payload)
        self.run.begin()
        self.run.say(said.text)
        self.on_ready(said)

    async def is_over(self, within_s: float) -> bool:
        """Waits; whether it is to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), within_s)
        return self.over.is_set()


Serve = Callable[[ServiceRun], Awaitable[Said]]
"""Serves until `over` is set; returns what it has done, its counters as the document.

Raises:
    EphemeronError: it cannot start, or cannot go on.
"""


class ServiceRuns(RunKind):
    """Runs of services."""

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        result = self.result(folder)
        if result is None:
            raise UserError(f"run {folder.run_id} is not running (interrupted): start it again with: ephemeron resume {folder.run_id}")
        for event in events_of(folder):
            following.on_event(event)
        return result

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        return _serve(folder, header, on_event=following.on_event)

    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        if not is_driven(folder):
            raise UserError(f"run {folder.run_id} is not running")
        if not now:
            (folder.path / STOP_FILE).touch()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner(folder), signal.SIGKILL)
        latest = time.monotonic() + _KILLED_S
        while is_driven(folder):
            if time.monotonic() > latest:
                raise UserError(f"the process of run {folder.run_id} does not end")
            time.sleep(STOP_LOOK_S / 10)
        with driving(folder):
            if folder.events.exists():
                conclude(folder, header, "stopped", ["it was killed"])

    def result(self, folder: RunFolder) -> RunResult | None:
        try:
            summary = build(ServiceSummary, folder.read(RESULT_FILE) or {}, where=RESULT_FILE)
        except JobError:
            return None
        return RunResult(summary, folder, summary.causes)


def start(
    name: str,
    payload: Mapping[str, Any],
    *,
    functions: int = 0,
    memory_mb: int = 0,
    lifetime_s: float = 0.0,
    servers: int = 0,
    private: Mapping[str, str] | None = None,
    on_ready: Callable[[Said], None],
) -> Said:
    """Serves until the end; returns what the service says then.

    Args:
        name: of the service.
        payload: its settings, JSON, without secrets.
        functions: of the service at once, at most.
        memory_mb, lifetime_s: of a function.
        servers: processes beside them that are paid by the hour.
        private: settings that are not written down.
        on_ready: called when clients can come.

    Raises:
        EphemeronError: it does not start, or could not go on.
    """
    folder = folders.create(folders.new_run_id(name))
    header = RunHeader(
        run_id=folder.run_id,
        kind="service",
        name=name,
        platform="local",
        functions=functions,
        memory_mb=memory_mb,
        lifetime_s=lifetime_s,
        servers=servers,
        prices=load_prices("objects", servers=servers > 0),
        payload=payload,
    )
    ended: list[Said] = []
    with driving(folder):
        _serve(folder, header, private=private or {}, on_ready=on_ready, on_end=ended.append)
    return ended[0]


def read_token(file: str, variable: str, whose: str) -> str:
    """The token of a service.

    Args:
        file: with the token; empty: the environment variable has it.
        variable: environment variable.
        whose: for the error.

    Raises:
        JobError: there is none.
    """
    try:
        token = (Path(file).read_text() if file else os.environ.get(variable, "")).strip()
    except OSError as e:
        raise JobError(f"{file} cannot be read: {e.strerror}", remedy=f"give --token-file FILE, or set {variable}") from None
    if not token:
        raise JobError(f"{file or whose} has no token", remedy=f"give --token-file FILE, or set {variable}")
    return token


def _serve(
    folder: RunFolder,
    header: RunHeader,
    *,
    private: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_ready: Callable[[Said], None] = lambda said: None,
    on_end: Callable[[Said], None] = lambda said: None,
) -> RunResult:
    """Serves in the run's folder, whose lock the caller holds."""
    serve = cast(Serve, find_service(header.name))

    async def until_over(run: ClientRun, interrupts: Interrupts) -> Said:
        over = asyncio.Event()
        with interrupts.handled(over.set):
            looking = asyncio.create_task(_look_for_stop(run, over))
            try:
                return await serve(ServiceRun(run, over, private or {}, on_ready))
            finally:
                run.status = "stopped" if over.is_set() else "finished"
                looking.cancel()

    with living(folder, header, on_event=on_event) as run:
        said = blocking.run(lambda interrupts: until_over(run, interrupts))
    result = ServiceRuns().result(folder)
    assert result is not None  # it was ready, as it has ended without an error
    counters = {key: value for key, value in said.document.items() if isinstance(value, int | float)}
    known = {f.name: getattr(result.summary, f.name) for f in fields(RunSummary)}
    summary = ServiceSummary(**known, counters=counters)
    write_summary(folder, summary)
    on_end(said)
    return RunResult(summary, folder, summary.causes)


async def _look_for_stop(run: ClientRun, over: asyncio.Event) -> None:
    while not over.is_set():
        if run.is_to_stop:
            over.set()
        await asyncio.sleep(STOP_LOOK_S)
