"""Runs that live in one process: services and profiles. Header, events, log and result, which that process alone writes.

What the library logs meanwhile is in the run's log, and among its events, so that `attach` shows it to other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ephemeron.errors import RunStopped
from ephemeron.events import Event, Note, RunEnded, RunStarted, to_json
from ephemeron.functions.hosted_run import HostedRun
from ephemeron.functions.jsonl import Journal
from ephemeron.runs.cost import Bill, CostMeter
from ephemeron.runs.folders import RESULT_FILE, RunFolder, events_of, last_t
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.logs import CLIENT_LOG
from ephemeron.runs.summary import RunSummary, write_summary
from ephemeron.user_code import line_of

STOP_FILE = "stop"
"""In the folder of a run: its client is to stop."""
STOP_LOOK_S = 0.2
"""Interval at which clients look for it."""
Status = Literal["finished", "stopped", "failed"]


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
        self.begun = False
        self._journal = Journal(folder.events)
        self._on_event = on_event

    @property
    def t(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.time() - self.header.started_at)

    @property
    def is_to_stop(self) -> bool:
        """Whether another process has asked it to."""
        return (self.folder.path / STOP_FILE).exists()

    def update(self, **changes: Any) -> None:
        """Replaces fields of the header."""
        self.header = replace(self.header, **changes)
        write_header(self.folder, self.header)

    def begin(self) -> None:
        """Writes the first event of this start."""
        (self.folder.path / RESULT_FILE).unlink(missing_ok=True)
        HostedRun(self.folder.path, {}).close_unfinished()
        h = self.header
        self.emit(
            RunStarted(
                t=self.t,
                run_id=h.run_id,
                job=h.name,
                workers=h.functions,
                aggregators=0,
                memory_mb=h.memory_mb,
                iterations=0,
                epochs=0,
                samples=0,
                platform=h.platform,
                wall_time=h.started_at,
            )
        )
        self.begun = True

    def emit(self, event: Event) -> None:
        """Adds an event."""
        self._journal.append(to_json(event))
        self._on_event(event)

    def say(self, text: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Adds a line to the log, and to the events."""
        path = self.folder.path / CLIENT_LOG
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as log:
                log.write(f"{text}\n")
        self.emit(Note(t=self.t, level=level, text=text))


@contextlib.contextmanager
def living(folder: RunFolder, header: RunHeader, *, on_event: Callable[[Event], None] = lambda event: None) -> Iterator[ClientRun]:
    """Runs a block as a run. The caller holds the lock of its folder; a run that is started again goes on after its last event.

    A run that has ended before `begin` leaves nothing.

    Args:
        folder: of the run.
        header: of the run, whose start is set.
        on_event: called with its events.
    """
    (folder.path / STOP_FILE).unlink(missing_ok=True)
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
            conclude(folder, run.header, run.status, causes)
        elif not folder.events.exists():
            shutil.rmtree(folder.path, ignore_errors=True)


def conclude(folder: RunFolder, header: RunHeader, status: Status, causes: Sequence[str] = ()) -> None:
    """Writes the end of a run: of invocations whose end is not known, the last event, and the result."""
    HostedRun(folder.path, {}).close_unfinished()
    t = max(0.0, time.time() - header.started_at)
    Journal(folder.events).append(to_json(RunEnded(t=t, status=status, causes=list(causes))))
    write_summary(folder, summarized(folder, header, status=status, causes=causes))


def summarized(folder: RunFolder, header: RunHeader, *, status: str, causes: Sequence[str] = ()) -> RunSummary:
    """What the events of a run say of its end and its bill."""
    meter = CostMeter(header.prices, servers=header.servers)
    for event in events_of(folder):
        meter.feed(event)
    t = meter.ended_at
    return RunSummary(
        run_id=folder.run_id,
        status=status,
        seconds=round(t, 3),
        cost_usd=round(meter.cost_usd(t), 9),
        platform=header.platform,
        invocations=meter.invocations,
        billed=Bill(gb_seconds=round(meter.gb_seconds_at(t), 6), requests=meter.invocations, storage_usd=round(meter.storage_usd(t), 9)),
        budget_usd=header.budget_usd,
        prices=f"{header.prices.name}, {header.prices.as_of}",
        causes=tuple(causes),
    )


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
