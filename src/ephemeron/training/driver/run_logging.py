"""Logging of a run: events of the run become calls of its loggers, each of which has a thread of its own.

The driver only appends to queues. A logger that raises is left out after one warning, and at the end of the run a slow one is
waited for a limited time. `loggers.json` in the run's folder says under which ids the run was logged and how far, so that a
client that attaches or resumes continues there; what a killed client had not saved is logged again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, MissingExtra
from ephemeron.events import Event
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import PLAN_FILE, RESULT_FILE, RunFolder
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.step_metrics import StepMerger, StepMetrics
from ephemeron.training.job import LoggerSpec
from ephemeron.training.loggers import LoggedRun, Logger, Param, Status, make_logger
from ephemeron.training.worker.spec import RunSpec
from ephemeron.user_code import guarded, line_of

_log = logging.getLogger(__name__)

FINISH_S = 60.0
"""Seconds from the end of a run for which its loggers are waited for, all together."""
_MOST_UNSAVED = 1000
"""Calls of a logger between two of `save`, at most."""
LOGGERS_FILE = "loggers.json"
ARTIFACTS = (PLAN_FILE, RESULT_FILE, "report.html", "report.png")

_IN_USE: set[int] = set()
"""Identities of the loggers of all runs that this process drives."""

OnEvent: TypeAlias = Callable[[Event], None]
LoggerChoice: TypeAlias = str | LoggerSpec | Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerRecord:
    """How far a run has been logged by one logger."""

    name: str
    spec: LoggerSpec | None = None
    """None: it is an object of the caller, who has to give it again."""
    logged_as: str | None = None
    """What `Logger.start` returned."""
    params: bool = False
    """Parameters were logged."""
    train: int = 0
    """Last step of training that was logged."""
    evaluation: int = -1
    """Last evaluation that was logged."""
    finished: bool = False
    """The run has finished, and all of it was logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerRecords:
    """`loggers.json`."""

    loggers: tuple[LoggerRecord, ...] = ()


def chosen(loggers: Sequence[LoggerChoice]) -> list[tuple[Logger, LoggerRecord]]:
    """Loggers of a new run, with records that say that nothing has been logged.

    Raises:
        JobError: there is no such logger, or one is given twice.
        MissingExtra: a package is not installed.
    """
    found: list[tuple[Logger, LoggerRecord]] = []
    for given in loggers:
        if not isinstance(given, (str, LoggerSpec, Logger)):
            raise JobError(f"a logger is a {type(given).__name__}", remedy="give a name, a LoggerSpec or a Logger")
        logger = given if isinstance(given, Logger) else make_logger(given)
        spec = None if isinstance(given, Logger) else LoggerSpec.of(given) if isinstance(given, str) else given
        name = logger.name or type(logger).__name__
        if any(record.name == name for _, record in found):
            raise JobError(f"logger {name} is given twice", remedy="give each logger a name of its own")
        found.append((logger, LoggerRecord(name=name, spec=spec)))
    return found


def continued(folder: RunFolder, loggers: Sequence[LoggerChoice]) -> list[tuple[Logger, LoggerRecord]]:
    """Loggers of a run that is attached to or resumed: those that have logged it, and further ones.

    Those that have logged a finished run are left out, and so is one that cannot be made.

    Raises:
        JobError, MissingExtra: see `chosen`.
    """
    given = {record.name: (logger, record) for logger, record in chosen(loggers)}
    found: list[tuple[Logger, LoggerRecord]] = []
    for record in _records_of(folder):
        same = given.pop(record.name, None)
        if record.finished:
            continue
        if same is not None:
            found.append((same[0], record))
        elif record.spec is not None:
            try:
                found.append((make_logger(record.spec), record))
            except MissingExtra as e:
                _log.warning("the run is not logged by %s any more: %s", record.name, e)
    return [*found, *given.values()]


def _records_of(folder: RunFolder) -> tuple[LoggerRecord, ...]:
    raw = folder.read(LOGGERS_FILE)
    try:
        return () if raw is None else build(LoggerRecords, raw, where=LOGGERS_FILE).loggers
    except JobError as e:
        _log.warning("what was logged of run %s is not known, so all is logged again: %s", folder.run_id, e)
        return ()


@contextmanager
def logged(folder: RunFolder, spec: RunSpec, loggers: Sequence[tuple[Logger, LoggerRecord]], on_event: OnEvent) -> Iterator[RunLogging]:
    """Logs a run inside. Its end is logged as failed unless `conclude` is called.

    Raises:
        JobError: one of the loggers logs another run of this process.
    """
    used = {id(logger) for logger, _ in loggers}
    for logger, record in loggers:
        if id(logger) in _IN_USE:
            raise JobError(f"logger {record.name} logs another run of this process", remedy="give each run its own")
    _IN_USE.update(used)
    try:
        run = RunLogging(folder, spec, loggers, on_event)
        try:
            yield run
        finally:
            run.close("failed")
    finally:
        _IN_USE.difference_update(used)


class RunLogging:
    """Loggers of a run, fed with its events.

    Args:
        folder, spec: of the run.
        loggers: and how far each has logged the run.
        on_event: called with every event first.
    """

    def __init__(self, folder: RunFolder, spec: RunSpec, loggers: Sequence[tuple[Logger, LoggerRecord]], on_event: OnEvent) -> None:
        self._spec, self._on_event, self._folder = spec, on_event, folder
        self._merger, self._meter = StepMerger(merged=spec.shares_evaluations), CostMeter(spec.prices, servers=spec.servers)
        self._closed = False
        self._storing = threading.Lock()
        run = LoggedRun(run_id=spec.run_id, job=spec.name, folder=folder.path)
        names = {record.name for _, record in loggers}
        self._others = tuple(record for record in _records_of(folder) if record.name not in names)
        self._writers = [_Writer(logger, record, run, self._store) for logger, record in loggers]
        self._params = params_of(spec) if loggers else {}
        self._last = 0
        for writer in self._writers:
            writer.log_params(self._params)
            writer.start()

    def on_event(self, event: Event) -> None:
        """Passes an event on, and logs what it completes."""
        self._on_event(event)
        if not self._writers:
            return
        self._meter.feed(event)
        row = self._merger.feed(event)
        if row is None:
            return
        self._last = max(self._last, row.step)
        metrics = {
            **{f"{row.split}/{name}": value for name, value in row.metrics.items()},
            "epoch": row.epoch,
            "run/time_s": round(row.t, 3),
            "run/cost_usd": self._meter.cost_usd(row.t),
        }
        for writer in self._writers:
            writer.log_row(row, metrics)

    def conclude(self, result: Result) -> Result:
        """Logs the end of a run: bill, plan and report. Waits until all is logged, but not longer than `FINISH_S`."""
        s = result.summary
        bill = {
            "run/time_s": s.seconds,
            "run/cost_usd": s.cost_usd,
            "run/gb_seconds": s.billed.gb_seconds,
            "run/storage_usd": s.billed.storage_usd,
            "run/invocations": float(s.invocations),
        }
        for writer in self._writers:
            writer.put(lambda logger: logger.log_metrics(bill, max(self._last, s.iterations)))
            for path in (self._folder.path / name for name in ARTIFACTS):
                if path.exists():
                    writer.put(lambda logger, path=path: logger.log_artifact(path))  # type: ignore[misc]
        self.close("finished" if s.status == "finished" else "stopped" if s.status == "stopped" else "failed")
        return result

    def close(self, status: Status) -> None:
        """Ends logging. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + FINISH_S
        for writer in self._writers:
            writer.finish(status)
        for writer in self._writers:
            writer.join(max(0.0, until - time.monotonic()))
            if writer.is_alive():
                _log.warning(
                    "logger %s has not finished %g s after the run; it goes on until this process ends", writer.record.name, FINISH_S
                )

    def _store(self) -> None:
        with self._storing:
            records = LoggerRecords(loggers=(*self._others, *(writer.record for writer in self._writers)))
            self._folder.write(LOGGERS_FILE, plain(records))


_Call: TypeAlias = Callable[[Logger], None]
_Update: TypeAlias = Mapping[str, int | bool]
"""Fields of the record that change with a call."""


class _Writer(threading.Thread):
    """Thread of a logger."""

    def __init__(self, logger: Logger, record: LoggerRecord, run: LoggedRun, store: Callable[[], None]) -> None:
        super().__init__(name=f"ephemeron-logger-{record.name}", daemon=True)
        self.record = record
        self._logger, self._store = logger, store
        self._run_logged = dataclasses.replace(run, logged_as=record.logged_as)
        self._calls: queue.SimpleQueue[tuple[_Call, _Update] | Status] = queue.SimpleQueue()
        self._queued = record
        """The record when all calls of the queue have been made."""

    def put(self, call: _Call, **update: int | bool) -> None:
        """Makes a call after those before it."""
        self._queued = dataclasses.replace(self._queued, **update)  # type: ignore[arg-type]
        self._calls.put((call, update))

    def log_params(self, params: Mapping[str, Param]) -> None:
        """Logs parameters, once."""
        if not self._queued.params:
            self.put(lambda logger: logger.log_params(params), params=True)

    def log_row(self, row: StepMetrics, metrics: Mapping[str, float]) -> None:
        """Logs metrics of a step, unless they have been logged."""
        if row.step > (self._queued.train if row.split == "train" else self._queued.evaluation):
            self.put(lambda logger: logger.log_metrics(metrics, row.step), **{row.split: row.step})

    def finish(self, status: Status) -> None:
        """Ends after all calls before it."""
        self._calls.put(status)

    def run(self) -> None:
        try:
            with guarded():
                self._log()
        except Exception as e:  # noqa: BLE001 - a logger is a program of others, and the run does not depend on it
            _log.warning("logger %s failed, and this run is not logged by it any more: %s", self.record.name, line_of(e))
            _log.debug("logger %s", self.record.name, exc_info=True)

    def _log(self) -> None:
        logged_as = self._logger.start(self._run_logged)
        self.record = dataclasses.replace(self.record, logged_as=logged_as)
        self._store()
        status: Status | None = None
        while status is None:
            record = self.record
            for item in self._waiting():
                if isinstance(item, str):
                    status = item
                else:
                    call, update = item
                    call(self._logger)
                    record = dataclasses.replace(record, **update)  # type: ignore[arg-type]
            self._logger.save()
            self.record = record
            self._store()
        self._logger.finish(status)
        self.record = dataclasses.replace(self.record, finished=status == "finished")
        self._store()

    def _waiting(self) -> Iterator[tuple[_Call, _Update] | Status]:
        """The next item of the queue, and those that are there already."""
        yield self._calls.get()
        with contextlib.suppress(queue.Empty):
            for _ in range(_MOST_UNSAVED - 1):
                yield self._calls.get_nowait()


_CHOICES = (
    "script",
    "task",
    "model",
    "loss",
    "optimizer",
    "options",
    "configuration",
    "epochs",
    "seed",
    "dtype",
    "samples",
    "budget_usd",
    "time_limit_s",
    "last_batch",
)
"""Fields of a specification that a person has chosen."""


def params_of(spec: RunSpec) -> dict[str, Param]:
    """What was chosen for a run, by dotted name. Options that are not set are left out."""
    values = plain(spec)
    replaced = () if spec.task is None and spec.script is None else ("model", "loss", "optimizer")
    return dict(_flat({name: values[name] for name in _CHOICES if name not in replaced}))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, Param]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        yield name, json.dumps(plain(value), default=str)
    elif value is not None and value != "":
        yield name, value if isinstance(value, (str, int, float, bool)) else str(value)
