"""One run's event log as aggregates, read once and then followed.

Most lines of a log say that an iteration is done. They are decoded without the fields that no page needs, collected, and added to
arrays once for many. All other events are kept as they are, and give the functions, the marks and the cost: by `CostMeter`, which
prices a run everywhere, so that the dashboard and the bill cannot differ. A reading costs some 10 µs an iteration of a function.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ephemeron.config.typed import build
from ephemeron.dashboard.log_reader import LogReader
from ephemeron.dashboard.means import IterationMeans
from ephemeron.dashboard.phases import PhaseLanes
from ephemeron.errors import JobError
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
    from_json,
)
from ephemeron.training.driver.cost import CostMeter, servers_of
from ephemeron.training.driver.records import RunRecord, read_record
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.planner.prices import Prices
from ephemeron.training.report.invocations import InvocationRow

_log = logging.getLogger(__name__)

_PROGRESS = b'{"kind":"progress",'
_COST_POINTS = 1024
"""Points of the cost over time; beyond that, every second one is dropped."""
_MOST_NOTES = 200


@dataclass(slots=True)
class _Report:
    """The fields of `Progress` that pages show."""

    t: float
    rank: int
    attempt: int
    iteration: int
    samples: int
    epoch: int = 0
    loss: float | None = None
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    metrics: dict[str, float | None] = field(default_factory=dict)


_decode = msgspec.json.Decoder(_Report).decode


@dataclass(slots=True)
class _Reports:
    """Columns of the reports of one reading."""

    ranks: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def append(self, r: _Report, value: float | None) -> None:
        self.ranks.append(r.rank)
        self.iterations.append(r.iteration)
        self.attempts.append(r.attempt)
        self.values.append(math.nan if value is None else value)
        self.samples.append(r.samples)
        self.times.append(r.t)

    def into(self, means: IterationMeans) -> None:
        means.add(self.ranks, self.iterations, self.attempts, self.values, self.samples, self.times)


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
        self.record: RunRecord | None = None
        self.meter = CostMeter(_free())
        self._servers = 0
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
            self.version += 1
            return True

    def read_for(self, seconds: float) -> None:
        """Reads on for some seconds, or to the end of the log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.advance():
            pass

    def _read_record(self) -> None:
        """Prices and servers of the run, before its first event."""
        self.record = record = read_record(self.folder)
        if record is None or self.meter.invocations:
            return
        try:
            spec = record.run_spec()
            self.meter.prices, self._servers = spec.prices, servers_of(spec)
        except JobError:
            prices = record.spec.get("prices")
            if isinstance(prices, dict):
                try:
                    self.meter.prices = build(Prices, prices, where="prices")
                except JobError as e:
                    _log.info("no prices of %s: %s", self.folder.run_id, e)

    def _take(self, lines: list[bytes]) -> None:
        losses, metrics = _Reports(), dict[str, _Reports]()
        for line in lines:
            try:
                if line.startswith(_PROGRESS):
                    t = self._report(_decode(line), line, losses, metrics)
                elif line.strip():
                    event = from_json(line.decode(errors="replace"))
                    t = event.t
                    if isinstance(event, Progress):
                        self._report(_decode(line), line, losses, metrics)
                    else:
                        self._event(event)
                else:
                    continue
            except (ValueError, TypeError, AttributeError, KeyError):
                self.unread += 1
                continue
            if t > self.t:
                self.t = t
            if t >= self._cost_due and self._reports >= self._cost_reports:
                self._sample_cost()
        losses.into(self.loss)
        for name, reports in metrics.items():
            reports.into(self.metrics.setdefault(name, IterationMeans()))
        self._feed_latest()

    def _report(self, r: _Report, line: bytes, losses: _Reports, metrics: dict[str, _Reports]) -> float:
        self._reports += 1
        losses.append(r, r.loss)
        if r.spans:
            self.lanes.add(r.rank, r.spans)
        for name, value in r.metrics.items():
            metrics.setdefault(name, _Reports()).append(r, value)
        self.latest[r.rank, r.attempt] = line
        self.last_seen[r.rank, r.attempt] = r.t
        self.iteration_of[r.rank] = r.iteration
        self.epoch = max(self.epoch, r.epoch)
        return r.t

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
            event = from_json(line.decode(errors="replace"))
            assert isinstance(event, Progress)
            event.spans.clear()
            self.meter.feed(event)
        self.latest.clear()

    def _sample_cost(self) -> None:
        self._cost_reports = self._reports + len(self.latest) * min(20, self._reports // 500)
        self._feed_latest()
        self.cost_times.append(self.t)
        self.cost_usd.append(self.meter.cost_usd(self.t, self._servers))
        if not self._cost_step:
            self._cost_step = 0.25
        if len(self.cost_times) > _COST_POINTS:
            self.cost_times, self.cost_usd = self.cost_times[::2], self.cost_usd[::2]
            self._cost_step *= 2
        self._cost_due = self.t + self._cost_step

    def cost_now(self) -> float:
        """Everything until the last moment known, in USD."""
        return self.meter.cost_usd(self.t, self._servers)


def _free() -> Prices:
    """Prices of a run that has told none."""
    return Prices(name="", as_of="", gb_second_usd=0.0, invocation_usd=0.0)
