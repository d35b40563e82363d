"""Collects records and log lines of a run into two files of its folder.

    events.jsonl    the run's events, as every platform has them; Invoked and Ended are written here, once each
    calls.jsonl     the records, and a `FinalRecord` for each end: enough to go on after this process has died

One process collects for a run: the one that holds the lock of the folder. Others read the files. Segments that were written
to the files are deleted from the store, so that a list returns only new ones; only the first segments of deliveries stay
until the cloud cannot deliver the same call again. A collector that dies between writing and deleting leaves segments that
the next one reads again: records may be fed twice, ends are not written twice, and events of workers may be written twice,
which readers of a stream expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.wrappers import Metered
from ephemeron.errors import ChannelError
from ephemeron.events import Ended, Note, Traffic, from_json, to_json
from ephemeron.functions.async_invoke.call_tracker import NOT_BEGUN_S, CallResult, CallTracker
from ephemeron.functions.async_invoke.log_source import LogSource
from ephemeron.functions.async_invoke.records import (
    CancelledRecord,
    FinalRecord,
    Record,
    RecordKeys,
    SendingRecord,
    cancelled_ids,
    decode,
    line_of,
    record_of,
)
from ephemeron.functions.base import Outcome, ended_event
from ephemeron.functions.jsonl import Journal

CALLS_FILE = "calls.jsonl"
EVENTS_FILE = "events.jsonl"
LOCK_FILE = "collector.lock"
LOGS_FOLDER = "logs"
CLIENT = "client."
"""Prefix of a client's name as writer."""
_AT_ONCE = 16
_STOP_S = 30.0

_log = logging.getLogger(__name__)


async def _nothing() -> None:
    pass


before_deletion: ContextVar[Callable[[], Awaitable[None]]] = ContextVar("ephemeron_before_deletion", default=_nothing)
"""Awaited when segments are in the files of the folder and before they are deleted from the store, by collectors that are started inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    writer: str
    delivery: int
    number: int
    key: str
    lines: Sequence[str]


class Collector:
    """Collects for one run, in the background of its owner.

    Args:
        run_dir: the run's folder.
        channel: of the run, by a connection of the collector's own.
        names: of the records.
        logs: log source; None: logs are not read.
        every_s: seconds between two rounds.
        clock: seconds, for waits.
    """

    def __init__(
        self,
        run_dir: Path,
        channel: Channel,
        names: RecordKeys,
        logs: LogSource | None,
        *,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = CallTracker()
        self._run_dir, self._names, self._logs = run_dir, names, logs
        self._channel = Metered(channel)
        self._every_s, self._clock = every_s, clock
        self._events = Journal(run_dir / EVENTS_FILE)
        self._records = Journal(run_dir / CALLS_FILE)
        self._next: dict[tuple[str, int], int] = {}
        self._written: set[str] = set()
        """Invocations whose end is in the events already."""
        self._invoked: set[str] = set()
        self._booked = Traffic()
        self._wake = asyncio.Event()
        self._stopping = False
        self.looked = asyncio.Event()
        """Set when everything present at the beginning is known, or another process collects."""
        self._fetching = asyncio.Semaphore(_AT_ONCE)
        self._complaints: set[str] = set()
        self._latest = 0.0

    async def run(self) -> None:
        """Waits for its turn, and collects until it is cancelled."""
        with (self._run_dir / LOCK_FILE).open("ab") as lock:
            while not _taken(lock.fileno()):
                self.looked.set()
                if await self._paused():
                    return
            self._remember()
            while True:
                try:
                    await self.round()
                except Exception as e:  # noqa: BLE001 - after any error, watching goes on
                    self._complain(f"a round of collecting failed: {type(e).__name__}: {e}")
                self.looked.set()
                if await self._paused():
                    return

    def hurry(self) -> None:
        """Starts the next round at once."""
        self._wake.set()

    def stop(self) -> None:
        """Lets `run` return after its current round, so that no segment is written and not deleted."""
        self._stopping = True
        self._wake.set()

    async def _paused(self) -> bool:
        """Waits for the next round; returns whether to end."""
        if not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._every_s)
            self._wake.clear()
        return self._stopping

    async def round(self) -> None:
        """Reads the store, and the logs while a call is open."""
        try:
            await self._collect()
        except ChannelError as e:
            self._complain(f"what functions report cannot be read: {e}")
        if self._logs is not None and self.calls.open:
            for said in await self._logs.poll():
                self.calls.feed_log(said, now=self._clock())
            if self._logs.problem:
                self._complain(f"logs cannot be read, so bills are as functions measured them: {self._logs.problem}")
        for final in self.calls.due(now=self._clock()):
            await self._end(final)

    # -- the store ------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        found, stale = [], []
        for key in await self._channel.list(self._names.all):
            if key == self._names.cancel:
                await self._read_cancellation()
            elif (at := self._names.parse(key)) is not None:
                if not self._is_known_claim(at):
                    found.append((at, key))
                elif self._is_old(at[0]):
                    stale.append(key)
        segments = await asyncio.gather(*(self._segment(*at, key) for at, key in sorted(found)))
        # Causes before effects: a call is announced in the segment of its sender, not in its own.
        lines = [(record_of(line), line) for segment in segments for line in segment.lines]
        sending = [(record, line) for record, line in lines if isinstance(record, SendingRecord)]
        for record, line in sorted(sending, key=lambda pair: pair[0].at):
            self._take(record, line)
        done = [segment.key for segment in segments if self._digest(segment)]
        if done or stale:
            await before_deletion.get()()
            await self._channel.delete([*done, *stale])

    async def _segment(self, writer: str, delivery: int, number: int, key: str) -> _Segment:
        async with self._fetching:
            data = await self._channel.fetch(key)
        return _Segment(writer=writer, delivery=delivery, number=number, key=key, lines=() if data is None else decode(data))

    def _is_known_claim(self, at: tuple[str, int, int]) -> bool:
        """Whether it is the `BegunRecord` of a known delivery: it stays, so that the next delivery finds it."""
        writer, delivery, number = at
        sent = self.calls.sent.get(writer)
        return number == 0 and sent is not None and delivery in sent.deliveries

    def _is_old(self, writer: str) -> bool:
        """Whether a call has ended, and the cloud would not deliver it again."""
        sent = self.calls.sent[writer]
        return not sent.open and self._clock() > sent.seen_at + NOT_BEGUN_S

    def _digest(self, segment: _Segment) -> bool:
        """Takes in a segment if it is the next one of a known writer; returns whether it may be deleted."""
        ours = segment.writer.startswith(CLIENT)
        if not (ours or segment.writer in self.calls.sent):
            return False
        writer = segment.writer, segment.delivery
        number = self._next.get(writer, segment.number)
        if number < segment.number:
            return False
        if number == segment.number:
            for line in segment.lines:
                record = record_of(line)
                if record is None:
                    self._events.append(line)
                elif not isinstance(record, SendingRecord):
                    self._take(record, line)
            self._next[writer] = number + 1
        return ours or segment.number > 0

    def _take(self, record: Record, line: str) -> None:
        self._records.append(line)
        for event in self.calls.feed(record, now=self._clock()):
            self._latest = max(self._latest, event.t)
            if event.invocation not in self._invoked:
                self._invoked.add(event.invocation)
                self._events.append(to_json(event))

    async def _read_cancellation(self) -> None:
        # `EVERYTHING` is for deliveries after the end of the run, which no client waits for.
        for id in cancelled_ids(await self._channel.fetch(self._names.cancel)):
            sent = self.calls.sent.get(id)
            if sent is not None and sent.open:
                self.calls.feed(CancelledRecord(id=id), now=self._clock())

    # -- ends -----------------------------------------------------------------------------------------------

    async def _end(self, final: CallResult) -> None:
        outcome = final.outcome
        if outcome.status not in ("ok", "cancelled") and final.stream:
            outcome = dataclasses.replace(outcome, error=await self._with_logs(final))
            if outcome.status == "lost" and "[ERROR]" in outcome.error:
                outcome = dataclasses.replace(outcome, status="error")  # raised before the handler could report it
        name = final.invocation
        _log.info("invocation %s has ended: %s, billed %g s by %s", name, outcome.status, outcome.billed_s, final.billed_by)
        record = FinalRecord(
            id=final.id, delivery=final.delivery, request=final.request, invocation=name, outcome=outcome, billed_by=final.billed_by
        )
        if name not in self._written:
            self._written.add(name)
            self._write_end(final, outcome, name)
        self._records.append(line_of(record))

    def _write_end(self, final: CallResult, outcome: Outcome, name: str) -> None:
        origin = final.call.origin
        t = max(self._latest, time.time() - origin)
        event = ended_event(final.call, name, outcome, t=t)
        traffic = self._channel.traffic
        event = dataclasses.replace(event, traffic=event.traffic + final.traffic + _minus(traffic, self._booked))
        self._booked = traffic
        if final.billed_by in ("handler", "unknown") and outcome.status != "cancelled" and final.request:
            how = "as its handler measured it" if final.billed_by == "handler" else "not at all: its bill is not known"
            self._events.append(to_json(Note(t=t, text=f"{name} is billed {how}; no REPORT line came in time")))
        self._events.append(to_json(event))

    async def _with_logs(self, final: CallResult) -> str:
        """The error, with a reference to the last log lines of the function, which are written to a file."""
        said = final.outcome.error
        if self._logs is None:
            return said
        tail = await self._logs.tail(final.stream, final.request)
        if not tail:
            return said
        folder = self._run_dir / LOGS_FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"{final.invocation}.txt"
        path.write_text("\n".join(tail) + "\n")
        raised = [line for line in tail if line.startswith("[ERROR]")]
        if final.outcome.status == "lost" and raised:
            return f"{raised[-1]}; see {LOGS_FOLDER}/{path.name}"
        return said if final.outcome.status == "error" else f"{said}; see {LOGS_FOLDER}/{path.name}"

    # -- before and after -----------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Reads what earlier collectors of this run have written."""
        for path in (self._run_dir / EVENTS_FILE, self._run_dir / CALLS_FILE):
            if not path.exists():
                continue
            for line in path.read_text(errors="replace").splitlines():
                record = record_of(line)
                if record is not None:
                    self._invoked.update(e.invocation for e in self.calls.feed(record, now=self._clock()))
                elif '"kind":"ended"' in line:
                    with contextlib.suppress(ValueError, TypeError):
                        event = from_json(line)
                        if isinstance(event, Ended):
                            self._written.add(event.invocation)

    def _complain(self, text: str) -> None:
        """Warns, once for each text."""
        if text not in self._complaints:
            self._complaints.add(text)
            _log.warning("%s", text)
            self._events.append(to_json(Note(t=self._latest, level="warning", text=text)))


@asynccontextmanager
async def collecting(collector: Collector) -> AsyncIterator[Collector]:
    """Runs a collector in the background."""
    task = asyncio.create_task(collector.run())
    try:
        yield collector
    finally:
        collector.stop()
        await asyncio.wait({task}, timeout=_STOP_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_collected(run_dir: Path) -> bool:
    """Whether a process of this machine collects for a run."""
    if not (run_dir / LOCK_FILE).exists():
        return False
    with (run_dir / LOCK_FILE).open("ab") as lock:
        return not _taken(lock.fileno(), fcntl.LOCK_SH)


def _taken(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _minus(a: Traffic, b: Traffic) -> Traffic:
    return Traffic(**{f.name: getattr(a, f.name) - getattr(b, f.name) for f in dataclasses.fields(a)})
