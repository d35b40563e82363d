"""Runs that live in one process: services and profiles. Header, events, log and result, which that process alone writes.

What the library logs meanwhile is in the run's log, and among its events, so that `attach` shows it to other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from ephemeron.config.typed import build
from ephemeron.errors import JobError, RunStopped, UserError
from ephemeron.events import Ended, Event, Invoked, Note, RunEnded, RunStarted, Started, to_json
from ephemeron.functions.hosted_run import HostedRun
from ephemeron.functions.jsonl import Journal, complete_lines, events_in
from ephemeron.runs.cost import Bill, CostMeter
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of, last_t
from ephemeron.runs.header import RunHeader, started, write_header
from ephemeron.runs.kinds import Following, RunKind
from ephemeron.runs.lock import driving, is_driven, owner
from ephemeron.runs.logs import CLIENT_LOG, LOGS_FOLDER
from ephemeron.runs.stop_requests import request_stop, stop_requested, withdraw_stop
from ephemeron.runs.summary import RunResult, RunSummary, write_summary
from ephemeron.user_code import line_of

STOP_LOOK_S = 0.2
"""Interval at which clients look for it."""
_KILLED_S = 10.0
"""Seconds in which a killed process has to be gone."""
Status = Literal["finished", "stopped", "failed"]
Summary = TypeVar("Summary", bound=RunSummary)


class ClientRun:
    """A run of this process, whose lock it holds. Made by `living`.

    Args:
        folder, header: of the run.
        on_event: called with its events.
    """

    def __init__(self, folder: RunFolder, header: RunHeader, on_event: Callable[[Event], None]) -> None:
        self.folder, self.header = folder, header
        self.status: Status = "finished"
        """With which it ends, if nothing is raised."""
        self.more: dict[str, Any] = {}
        """Fields of its result that the kind adds, or knows better than the events."""
        self.begun = False
        self._offsets: dict[Path, int] = {}
        self._shifts: dict[Path, float] = {}
        self._journal = Journal(folder.events)
        self._on_event = on_event

    @property
    def t(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.time() - self.header.started_at)

    @property
    def is_to_stop(self) -> bool:
        """Whether another process has asked it to."""
        return bool(stop_requested(self.folder))

    def update(self, **changes: Any) -> None:
        """Replaces fields of the header."""
        self.header = replace(self.header, **changes)
        write_header(self.folder, self.header)

    def begin(self) -> None:
        """Writes the first event of this start."""
        (self.folder.path / RESULT_FILE).unlink(missing_ok=True)
        HostedRun(self.folder.path, {}).close_unfinished()
        h = self.header
        self.emit(started(h, t=self.t, wall_time=h.started_at))
        self.begun = True

    def emit(self, event: Event) -> None:
        """Adds an event."""
        self._journal.append(to_json(event))
        self._on_event(event)

    def skip(self, events: Path) -> None:
        """Leaves out what a part of this run has in its stream of events so far."""
        self._offsets[events] = events.stat().st_size

    def collect(self, events: Path) -> int:
        """Copies starts and ends of functions that are new in the stream of a part of this run, and links their logs.

        Returns:
            How many invocations were new.
        """
        offset, invoked = self._offsets.get(events, 0), 0
        if events.exists() and events.stat().st_size < offset:  # its folder was removed, and made again
            offset = 0
        lines = complete_lines(events, offset)
        self._offsets[events] = offset + len(lines)
        for event in events_in(lines):
            if isinstance(event, RunStarted):
                self._shifts[events] = event.wall_time - self.header.started_at
            if not isinstance(event, Invoked | Started | Ended):
                continue
            if isinstance(event, Invoked):
                invoked += 1
                name = f"{LOGS_FOLDER}/{event.invocation}.txt"
                self.link(events.parent / name, name)
            if isinstance(event, Ended) and not event.memory_mb:  # of a killed host, whose successor does not know it
                memory_mb = self.header.memory_mb
                event = replace(event, memory_mb=memory_mb, gb_seconds=memory_mb / 1024 * event.billed_s)
            self.emit(replace(event, t=event.t + self._shifts.get(events, 0.0)))
        return invoked

    def link(self, target: Path, name: str) -> None:
        """Makes a file elsewhere one of the run's folder, unless there is one of this name."""
        link = self.folder.path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target)

    def say(self, text: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Adds a line to the log, and to the events."""
        path = self.folder.path / CLIENT_LOG
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as log:
                log.write(f"{text}\n")
        self.emit(Note(t=self.t, level=level, text=text))


@contextlib.contextmanager
def living(
    folder: RunFolder, header: RunHeader, *, of: type[RunSummary], on_event: Callable[[Event], None] = lambda event: None
) -> Iterator[ClientRun]:
    """Runs a block as a run. The caller holds the lock of its folder; a run that is started again goes on after its last event.

    A run that has ended before `begin` leaves nothing.

    Args:
        folder: of the run.
        header: of the run, whose start is set.
        of: its result.
        on_event: called with its events.
    """
    withdraw_stop(folder)
    before = last_t(folder) if folder.events.exists() else 0.0
    run = ClientRun(folder, header, on_event)
    run.update(started_at=time.time() - before)
    handler, logger = _Handler(run), logging.getLogger("ephemeron")
    logger.addHandler(handler)
    causes: list[str] = []
    try:
        yield run
    except (KeyboardInterrupt, asyncio.CancelledError, RunStopped):
        run.status = "stopped"
        raise
    except BaseException as e:
        run.status, causes = "failed", [line_of(e)]
        raise
    finally:
        logger.removeHandler(handler)
        if run.begun:
            _conclude(folder, run.header, run.status, causes, of, run.more)
        elif not folder.events.exists():
            shutil.rmtree(folder.path, ignore_errors=True)


def _conclude(
    folder: RunFolder, header: RunHeader, status: Status, causes: Sequence[str], of: type[RunSummary], more: Mapping[str, Any]
) -> None:
    """Writes the end of a run: of invocations whose end is not known, the last event, and the result."""
    HostedRun(folder.path, {}).close_unfinished()
    t = max(0.0, time.time() - header.started_at)
    write_summary(folder, summarized(of, folder, header, seconds=t, status=status, causes=tuple(causes), **more))
    Journal(folder.events).append(to_json(RunEnded(t=t, status=status, causes=list(causes))))


def summarized(of: type[Summary], folder: RunFolder, header: RunHeader, *, seconds: float | None = None, **more: Any) -> Summary:
    """What the events of a run say of its end and its bill.

    Args:
        of: the kind's summary.
        folder, header: of the run.
        seconds: it has lived; None: until its last event.
        more: fields that events do not have.
    """
    meter = CostMeter(header.prices, servers=header.servers)
    for event in events_of(folder):
        meter.feed(event)
    t = meter.ended_at if seconds is None else seconds
    known: dict[str, Any] = {
        "run_id": folder.run_id,
        "seconds": round(t, 3),
        "cost_usd": round(meter.cost_usd(t), 9),
        "platform": header.platform,
        "invocations": meter.invocations,
        "billed": Bill(gb_seconds=round(meter.gb_seconds_at(t), 6), requests=meter.invocations, storage_usd=round(meter.storage_usd(t), 9)),
        "budget_usd": header.budget_usd,
        "prices": f"{header.prices.name}, {header.prices.as_of}",
    }
    return of(**(known | more))


class ClientRuns(RunKind):
    """What kinds of such runs share."""

    summary: ClassVar[type[RunSummary]]
    again: ClassVar[str]
    """What to do when the process is gone."""
    killable: ClassVar[bool]
    """Whether `stop --now` kills the process, which does nothing else; else it asks, as without."""

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        result = self.result(folder)
        if result is None:
            raise UserError(f"run {folder.run_id} is not running (interrupted): {self.again.format(run=folder.run_id)}")
        for event in events_of(folder):
            following.on_event(event)
        return result

    def stop(self, folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        request_stop(folder, now=now)
        if now and self.killable:
            self._kill(folder, header)

    def result(self, folder: RunFolder) -> RunResult | None:
        try:
            summary = build(self.summary, folder.read(RESULT_FILE) or {}, where=RESULT_FILE)
        except JobError:
            return None
        return RunResult(summary, folder, summary.causes)

    def _kill(self, folder: RunFolder, header: RunHeader) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner(folder), signal.SIGKILL)
        latest = time.monotonic() + _KILLED_S
        while is_driven(folder):
            if time.monotonic() > latest:
                raise UserError(f"the process of run {folder.run_id} does not end")
            time.sleep(STOP_LOOK_S / 10)
        with driving(folder):
            if folder.events.exists():
                _conclude(folder, header, "stopped", ["it was killed"], self.summary, {})


class _Handler(logging.Handler):
    """Puts what is logged at the level of the library into the log and the events of a run."""

    def __init__(self, run: ClientRun) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        if self._run.begun:
            level: Literal["info", "warning", "error"] = (
                "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
            )
            self._run.say(record.getMessage(), level)
