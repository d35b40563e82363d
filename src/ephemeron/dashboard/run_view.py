"""One run's event log as aggregates, read once and then followed.

Most lines of a log say that an iteration is done. They are decoded without the fields that no page needs, collected, and added to
arrays once for many. All other events are kept as they are, and give the functions, the marks and the cost: by `CostMeter`, which
prices a run everywhere, so that the dashboard and the bill cannot differ.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec

from ephemeron.dashboard.means import IterationMeans
from ephemeron.dashboard.phases import PhaseLanes
from ephemeron.events import (
    Checkpointed,
    Continued,
    Ended,
    Evaluated,
    Event,
    FaultFired,
    GenerationStarted,
    Invoked,
    Loaded,
    Measured,
    Note,
    Progress,
    RunEnded,
    RunStarted,
    Started,
    Traffic,
    from_json,
)
from ephemeron.prices import UNKNOWN
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.training.report.invocations import InvocationRow

_PROGRESS = b'{"kind":"progress",'
_COST_POINTS = 1024
"""Points of the cost over time; beyond that, every second one is dropped."""
_MOST_NOTES = 200
_FEED_BYTES = 16 << 20
"""Bytes of a long log after which the cost is brought up to date while the log is being read; at its end, always."""


class _Report(msgspec.Struct, gc=False):
    """The fields of `Progress` that pages show. The collector of garbage does not look at them: a reading makes thousands."""

    t: float
    rank: int
    attempt: int
    iteration: int
    samples: int
    epoch: int = 0
    loss: float | None = None
    spans: msgspec.Raw = msgspec.Raw(b"[]")
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)


_decode = msgspec.json.Decoder(_Report).decode


@dataclass(slots=True)
class _Counters:
    """The fields of `Progress` that the cost needs."""

    t: float
    rank: int
    attempt: int
    iteration: int
    traffic: Traffic = field(default_factory=Traffic)


_decode_counters = msgspec.json.Decoder(_Counters).decode


class RunView:
    """A run as it is known now. Calls from any thread; each holds `lock`.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self.folder = RunFolder(folder)
        self._begin()

    def _begin(self) -> None:
        self._reader = LogReader(self.folder.events)
        self.record: RunHeader | None = None
        self.meter = CostMeter(UNKNOWN)
        self.started: RunStarted | None = None
        self.launches: list[RunStarted] = []
        self.ended: RunEnded | None = None
        self.t = 0.0
        """Last moment known."""
        self.version = 0
        """Grows with every reading that found something."""
        self.unread = 0
        """Lines that are no events."""
        self.lanes = PhaseLanes()
        self.loss = IterationMeans()
        self.loss_of: dict[str, IterationMeans] = {}
        """By group of functions."""
        self.metrics: dict[str, IterationMeans] = {}
        self.calls: list[Event] = []
        """Events of invocations."""
        self.evaluated: dict[tuple[int, int], Evaluated] = {}
        """By iteration and rank, the highest attempt."""
        self.measured: dict[int, Measured] = {}
        self.generations: list[GenerationStarted] = []
        self.faults: list[FaultFired] = []
        self.notes: dict[tuple[str, str], Note] = {}
        self.checkpoint = 0
        self.epoch = 0
        """Of the latest report."""
        self.last_seen: dict[tuple[int, int], float] = {}
        """By rank and attempt, when it last reported."""
        self.latest: dict[tuple[int, int], bytes] = {}
        """By rank and attempt, its latest report that the meter has not seen."""
        self.iteration_of: dict[int, int] = {}
        """By rank, its latest iteration."""
        self.cost_times: list[float] = []
        self.cost_usd: list[float] = []
        self.functions: tuple[int, tuple[InvocationRow, ...]] = (-1, ())
        """Invocations, and the version at which they were put together."""
        self._cost_step = 0.0
        self._cost_due = 0.0
        self._unfed = 0
        """Bytes that were read since the meter was fed, about."""
        self._reports, self._cost_reports = 0, 0
        """Reports so far, and how many there have to be before the next point of the cost."""

    @property
    def share_read(self) -> float:
        """Part of the log that has been read."""
        return self._reader.share

    def advance(self, limit: int = 1 << 20) -> bool:
        """Reads on. Returns whether something was read: call it again then.

        Args:
            limit: bytes to read, about.
        """
        with self.lock:
            lines = self._reader.read(limit)
            if self._reader.replaced:
                version = self.version
                self._begin()
                self.version = version + 1
                lines = self._reader.read(limit)
            if not lines:
                return False
            if self.record is None:
                self._read_record()
            self._take(lines)
            self._unfed += limit
            if self._unfed >= _FEED_BYTES or self._reader.size - self._reader.offset < limit:
                self._unfed = 0
                self._feed_latest()
            self.version += 1
            return True

    def read_for(self, seconds: float) -> None:
        """Reads on for some seconds, or to the end of the log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.advance():
            pass

    def _read_record(self) -> None:
        """Prices and servers of the run, before its first event."""
        self.record = record = read_header(self.folder)
        if record is None or self.meter.invocations:
            return
        self.meter.prices, self.meter.servers = record.prices, record.servers

    def _take(self, lines: list[bytes]) -> None:
        reports: list[_Report] = []
        """Since the last other event."""
        for line in lines:
            try:
                event = None if line.startswith(_PROGRESS) else _parse_event(line)
                if event is None or isinstance(event, Progress):
                    if not line.strip():
                        continue
                    report = _decode(line)
                    reports.append(report)
                    self.latest[report.rank, report.attempt] = line
                    t = report.t
                else:
                    self._take_reports(reports)
                    t = event.t
                    self._event(event)
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                self.unread += 1
                continue
            if t > self.t:
                self.t = t
            if t >= self._cost_due and self._reports + len(reports) >= self._cost_reports:
                self._take_reports(reports)
                self._sample_cost()
        self._take_reports(reports)

    def _take_reports(self, reports: list[_Report]) -> None:
        """Adds reports to the curves and the lanes, and empties the list."""
        if not reports:
            return
        _add(self.loss, reports, [r.loss for r in reports])
        for group in self.meter.groups:
            own = [r for r in reports if group.started.has(r.rank)]
            _add(self.loss_of.setdefault(group.started.name, IterationMeans()), own, [r.loss for r in own])
        self.lanes.add_json([r.rank for r in reports], [bytes(r.spans) for r in reports])
        for name in dict.fromkeys(chain.from_iterable(r.metrics for r in reports)):
            some = [r for r in reports if name in r.metrics]
            _add(self.metrics.setdefault(name, IterationMeans()), some, [r.metrics[name] for r in some])
        self.last_seen |= {(r.rank, r.attempt): r.t for r in reports}
        self.iteration_of |= {r.rank: r.iteration for r in reports}
        self.epoch = max(self.epoch, max(r.epoch for r in reports))
        self._reports += len(reports)
        reports.clear()

    def _event(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started = self.started or event
                self.launches.append(event)
                self.ended = None
            case RunEnded():
                self.ended = event
            case Invoked() | Started() | Continued() | Ended():
                self.calls.append(event)
            case Loaded():
                self.lanes.add(event.rank, event.spans)
                self.last_seen[event.rank, event.attempt] = event.t
            case Evaluated():
                old = self.evaluated.get((event.iteration, event.rank))
                if old is None or event.attempt >= old.attempt:
                    self.evaluated[event.iteration, event.rank] = event
            case Measured():
                self.measured[event.iteration] = event
            case GenerationStarted():
                if event.generation not in {g.generation for g in self.generations}:
                    self.generations.append(event)
            case FaultFired():
                self.faults.append(event)
            case Note() if len(self.notes) < _MOST_NOTES:
                self.notes.setdefault((event.level, event.text), event)
            case Checkpointed():
                self.checkpoint = max(self.checkpoint, event.iteration)
            case _:
                pass
        self.meter.feed(event)

    def _feed_latest(self) -> None:
        """Feeds the meter with the latest report of each invocation, whose counters include those before."""
        for line in self.latest.values():
            c = _decode_counters(line)
            self.meter.feed(
                Progress(
                    t=c.t,
                    rank=c.rank,
                    attempt=c.attempt,
                    iteration=c.iteration,
                    epoch=0,
                    samples=0,
                    loss=math.nan,
                    version=0,
                    traffic=c.traffic,
                )
            )
        self.latest.clear()

    def _sample_cost(self) -> None:
        self._cost_reports = self._reports + len(self.latest) * min(20, self._reports // 500)
        self._feed_latest()
        self.cost_times.append(self.t)
        self.cost_usd.append(self.meter.cost_usd(self.t))
        if not self._cost_step:
            self._cost_step = 0.25
        if len(self.cost_times) > _COST_POINTS:
            self.cost_times, self.cost_usd = self.cost_times[::2], self.cost_usd[::2]
            self._cost_step *= 2
        self._cost_due = self.t + self._cost_step

    def cost_now(self, t: float | None = None) -> float:
        """Everything until a moment, by default the last one known, in USD."""
        return self.meter.cost_usd(self.t if t is None else t)

    def moment(self, status: str) -> float:
        """Seconds until now of an executor that runs, whose functions seldom report; else until the last moment known."""
        record = self.record
        if status != "running" or record is None or record.kind != "tasks" or record.platform == "simulated":
            return self.t
        return max(self.t, time.time() - record.started_at)


def _parse_event(line: bytes) -> Event | None:
    """The event of a line; None: it is empty."""
    return from_json(line.decode(errors="replace")) if line.strip() else None


def _add(means: IterationMeans, reports: Sequence[_Report], values: Sequence[float | None]) -> None:
    means.add(
        [r.rank for r in reports],
        [r.iteration for r in reports],
        [r.attempt for r in reports],
        [math.nan if value is None else value for value in values],
        [r.samples for r in reports],
        [r.t for r in reports],
    )


@dataclass(slots=True)
class LogReader:
    """Reader of one file, which need not exist yet.

    Lines that are not complete are left for the next call: a writer may be in the middle of one.
    """

    path: Path
    offset: int = 0
    """Bytes that have been returned as lines."""
    size: int = 0
    """Bytes of the file, when it was last looked at."""
    replaced: bool = False
    """The file became shorter, or is another one: what was read of it is void. The caller starts again with a new reader."""
    _inode: int = 0

    def read(self, limit: int = 1 << 20) -> list[bytes]:
        """The next complete lines, of about `limit` bytes at most; empty: there are none now."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                inode, self.size = status.st_ino, status.st_size
                self._inode = self._inode or inode
                if inode != self._inode or self.size < self.offset:
                    self.replaced = True
                    return []
                if self.size == self.offset:
                    return []
                file.seek(self.offset)
                data = file.read(limit)
                if b"\n" not in data:
                    data += file.readline()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[: max(0, end - 1)].split(b"\n") if end else []

    @property
    def share(self) -> float:
        """Part of the file that has been read, 0 to 1."""
        return min(1.0, self.offset / self.size) if self.size else 1.0
