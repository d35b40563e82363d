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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ephemeron import blocking
from ephemeron.blocking import Interrupts
from ephemeron.errors import JobError
from ephemeron.events import Event
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.client_run import STOP_LOOK_S, ClientRun, ClientRuns, living
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following, find_service
from ephemeron.runs.labels import check_labels
from ephemeron.runs.lock import driving
from ephemeron.runs.summary import RunResult, RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSummary(RunSummary):
    """`result.json` of a service."""

    counters: Mapping[str, float] = field(default_factory=dict)
    """What it has done, by name; of its latest start."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a service says when it is ready, and at its end."""

    text: str
    document: Mapping[str, Any]
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


class ServiceRuns(ClientRuns):
    """Runs of services."""

    summary = ServiceSummary
    again = "start it again with: ephemeron resume {run}"
    killable = True

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        _serve(folder, header, on_event=following.on_event)
        result = self.result(folder)
        assert result is not None  # it was ready, as it has ended without an error
        return result


def start(
    name: str,
    payload: Mapping[str, Any],
    *,
    functions: int = 0,
    memory_mb: int = 0,
    lifetime_s: float = 0.0,
    servers: int = 0,
    private: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
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
        labels: see `runs.labels`.
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
        labels=check_labels(labels),
    )
    with driving(folder):
        return _serve(folder, header, private=private or {}, on_ready=on_ready)


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
) -> Said:
    """Serves in the run's folder, whose lock the caller holds."""
    serve = cast(Serve, find_service(header.name))

    async def until_over(run: ClientRun, interrupts: Interrupts) -> Said:
        over = asyncio.Event()
        with interrupts.handled(over.set):
            looking = asyncio.create_task(_look_for_stop(run, over))
            try:
                said = await serve(ServiceRun(run, over, private or {}, on_ready))
            finally:
                looking.cancel()
        run.status = "stopped" if over.is_set() else "finished"
        run.more["counters"] = said.document
        return said

    with living(folder, header, of=ServiceSummary, on_event=on_event) as run:
        return blocking.run(lambda interrupts: until_over(run, interrupts))


async def _look_for_stop(run: ClientRun, over: asyncio.Event) -> None:
    while not over.is_set():
        if run.is_to_stop:
            over.set()
        await asyncio.sleep(STOP_LOOK_S)
