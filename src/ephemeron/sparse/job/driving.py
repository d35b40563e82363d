"""The client's side of a sparse run: it starts shards and functions, replaces those that die, evaluates, and keeps the limits.

Functions and their bills are those of the platform, and all events are in the run's folder, so whatever shows a run shows this one
too. Unlike in other runs, the client is needed: the shards are its processes, and end with it. They have stored what they
acknowledged, so `resume` goes on from the last report of each function.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ephemeron import logs
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.retrying import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build, plain
from ephemeron.data.tables import TableDataset
from ephemeron.errors import (
    ChannelError,
    EphemeronError,
    FunctionError,
    FunctionFailed,
    FunctionLost,
    JobError,
    PlatformError,
    RunFailed,
    UserError,
)
from ephemeron.events import Ended, Event, Invoked, Measured, Note, Progress, RunEnded, RunStarted, StoreRequests, Traffic
from ephemeron.functions.base import Call, Outcome, Platform, Reason
from ephemeron.functions.entries import PRELOAD_VARIABLE, PRELOADS
from ephemeron.runs import run_platform
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RunFolder, events_of, last_t
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.sparse.job.evaluation import Evaluations, read
from ephemeron.sparse.job.function import ENTRY, SparsePartRequest
from ephemeron.sparse.job.preparing import schedule_of
from ephemeron.sparse.job.programs import model_of, optimizer_of
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.store.functions import token_of
from ephemeron.sparse.training.part import Part, PartReport, progress_key
from ephemeron.sparse.training.run import Served, create_tables, served
from ephemeron.sparse.training.shares import PartEnd, PartTask, Shares, ShareWatcher
from ephemeron.training.driver import records
from ephemeron.training.driver.lifecycle import OnEvent, StopRequests
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.tensors import digest
from ephemeron.training.worker.result import FinalState
from ephemeron.training.worker.spec import RunSpec

_log = logging.getLogger(__name__)

PRELOADED = {PRELOAD_VARIABLE: ",".join(PRELOADS["sparse-part"])}
"""Environment of functions."""
_LOOK_S = 0.5
"""Interval at which limits and requests to stop are looked for."""
_METER_S = 5.0
"""Interval at which the requests of shards and client are told."""
_STOP_S = 15.0
"""Seconds that functions have to end at a report before they are killed."""
_LAST_S = 10.0
"""Seconds to hear of the ends of functions."""


async def drive(
    folder: RunFolder,
    run: RunHeader,
    spec: RunSpec,
    on_event: OnEvent,
    secrets: dict[str, str],
    stop: StopRequests,
    *,
    new: bool,
    attach: bool = False,
    session: Path | None = None,
) -> tuple[RunOutcome, CostMeter]:
    """Launches or resumes a sparse run, and supervises it to its end. The caller holds its lock.

    Args:
        folder, run, spec: of the run.
        on_event: called with every event, old ones first.
        secrets: variables of the channel.
        stop: stops the run.
        new: it is launched, not resumed.
        attach: only the result is wanted, since no client drives the run.
        session: folder of the daemon that hosts functions of this machine; None: the run's own.

    Raises:
        UserError: `attach`, and it has not finished.
        EphemeronError: functions or shards cannot be started.
    """
    if attach:
        return _finished(folder, spec, on_event)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(logs.context(run=folder.run_id))
        stack.enter_context(environment(secrets))
        channel = await stack.enter_async_context(open_channel(run.channel))
        control = RunChannel(channel, owner="client", retry=BRIEF)
        await control.delete([Keys(spec.run_id).control])
        platform = await run_platform.start(folder, run, {**secrets, **PRELOADED}, session=session)
        stack.push_async_callback(platform.shutdown)
        origin = time.time() if new else time.time() - last_t(folder)
        write_header(folder, dataclasses.replace(run, started_at=origin))
        driver = SparseDriver(folder, spec, platform, control, run.channel, on_event, origin=origin, labels=run.labels)
        with stop.handled(driver.interrupt):
            ending = await driver.run()
        if ending.status == "finished":
            await _clear(channel, driver.store_name)
        return ending, driver.meter


def _finished(folder: RunFolder, spec: RunSpec, on_event: OnEvent) -> tuple[RunOutcome, CostMeter]:
    known = records.read_result(folder)
    if known is None or known.status != "finished":
        raise UserError(
            f"run {folder.run_id} is not running ({'interrupted' if known is None else known.status}); "
            f"continue it with: ephemeron resume {folder.run_id}"
        )
    meter = CostMeter(spec.prices, servers=spec.servers)
    for event in events_of(folder):
        meter.feed(event)
        on_event(event)
    final = FinalState(iterations=known.iterations, metrics=known.metrics, weights_sha256=known.weights_sha256)
    return RunOutcome("finished", [], final=final), meter


async def _clear(channel: Channel, store: str) -> None:
    """Deletes what the shards of a finished run have left."""
    with contextlib.suppress(ChannelError):
        await channel.delete(await channel.list(f"{store}/"))
        channel.discard_staged(f"{store}/")


def _error_of(outcome: Outcome, part: Part) -> FunctionError:
    """What a function without a report has ended with."""
    lines = outcome.error.strip().splitlines() or [outcome.status.replace("_", " ")]
    if outcome.status == "error":  # the error's line, then its traceback, which names the class otherwise and may end in a note
        return FunctionFailed(lines[0], rank=part.rank, attempt=part.attempt)
    return FunctionLost(lines[-1], rank=part.rank, attempt=part.attempt)


class SparseDriver(ShareWatcher):
    """A client that drives a sparse run.

    Args:
        folder, spec: of the run.
        platform: where its functions run.
        control: the run's channel, for requests to stop.
        address: of the channel.
        on_event: sees every event, old ones first.
        origin: Unix time of the run's t = 0.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        platform: Platform,
        control: RunChannel,
        address: str,
        on_event: OnEvent,
        *,
        origin: float,
        labels: Mapping[str, str],
    ) -> None:
        assert spec.sparse is not None
        self.meter = CostMeter(spec.prices, servers=spec.servers)
        self.store_name = f"{spec.run_id}/store"
        self._folder, self._spec, self._platform, self._control = folder, spec, platform, control
        self._address, self._on_event, self._origin, self._labels = address, on_event, origin, labels
        self._program, self._schedule = spec.sparse, schedule_of(spec)
        self._model = model_of(self._program.spec)
        self._key = folder.signing_key()
        self._running: set[str] = set()
        """Invocations whose ends are not known."""
        self._relayed: set[int] = set()
        """Ranks whose last function has handed over."""
        self._began_at = time.time()
        self._stop_reason = ""
        self._requests = 0
        self._stopped_at = 0.0
        self._shares: Shares | None = None
        self._evaluations: Evaluations | None = None
        self._shards_traffic: Callable[[], Traffic] = Traffic
        self._test: TableDataset | None = None

    def interrupt(self, reason: str = "") -> None:
        """Stops the functions at their next report; the second time, kills them."""
        self._requests += 1
        if self._requests == 1:
            self._stop_reason, self._stopped_at = reason, time.monotonic()
            _log.info("stopping%s", f": {reason}" if reason else "")
        if self._shares is not None:
            self._shares.stop() if self._requests == 1 else self._shares.cancel()

    def now(self) -> float:
        """Seconds of the run."""
        return time.time() - self._origin

    async def run(self) -> RunOutcome:
        """Drives the run to its end."""
        await self._platform.cancel_all(self._spec.run_id)  # functions of a client that was killed
        await self._emit(self._started())
        reading = asyncio.ensure_future(self._read_events())
        try:
            ending = await self._trained()
        except (EphemeronError, OSError) as e:
            await self._platform.cancel_all(self._spec.run_id)
            ending = RunOutcome("failed", self._causes(e))
        finally:
            await self._tell_requests()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self._all_ended()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        for cause in ending.causes:
            await self._tell(Note(t=self.now(), level="error", text=cause))
        await self._tell(RunEnded(t=self.meter.ended_at, status=ending.status, causes=ending.causes))
        return ending

    def _causes(self, error: Exception) -> list[str]:
        if isinstance(error, JobError):
            return [str(error)]
        if isinstance(error, RunFailed):
            return list(error.causes)
        remedy = f"remove the cause, then continue with: ephemeron resume {self._spec.run_id}"
        return [f"{type(error).__name__}: {error}; {remedy}"]

    async def _trained(self) -> RunOutcome:
        settings, token = self._program.spec, token_of(self._key.text)
        if self._program.test is not None:
            self._test = await asyncio.to_thread(TableDataset.open, self._program.test)
        async with (
            served(settings.shards, settings.store, channel=self._address, name=self.store_name, token=token) as at,
            await SparseStore.connect(at.addresses, at.token) as store,
        ):
            self._shards_traffic = at.traffic
            await self._check_store(store)
            await create_tables(store, self._model, optimizer_of(settings), self._spec.seed)
            done = max((e.epoch for e in events_of(self._folder) if isinstance(e, Measured)), default=0)
            self._evaluations = Evaluations(self._model, self._schedule, self._test, store, self._emit, self.now, after=done)
            self._shares = Shares(self._start_part(at), store, self._parts(at), self, at.check)
            helpers = [asyncio.ensure_future(work) for work in (self._evaluations.run(), self._look())]
            try:
                if self._requests:
                    self._shares.stop()
                else:
                    await self._shares.trained()
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
            return await self._ending(store)

    async def _check_store(self, store: SparseStore) -> None:
        """Refuses to go on where what functions have reported is not in the store any more.

        Raises:
            JobError: it was deleted.
        """
        reported = next((e.rank for e in events_of(self._folder) if isinstance(e, Progress)), None)
        if reported is not None and await store.get(progress_key(self._spec.run_id, reported)) is None:
            raise JobError(f"the store of run {self._spec.run_id} was deleted, and what it has learnt with it", remedy="train again")

    async def _ending(self, store: SparseStore) -> RunOutcome:
        """The outcome, with the tables as they are now."""
        assert self._shares is not None
        assert self._evaluations is not None
        finished = self._shares.complete
        await self._evaluations.complete()
        weights: Any = await read(store, self._model)
        if not finished:
            if self._stop_reason:
                await self._emit(Note(t=self.now(), level="warning", text=f"stopped: {self._stop_reason}"))
            return RunOutcome("stopped", [], arrays=weights)
        final = FinalState(
            iterations=max(self._schedule.count(rank) for rank in range(self._schedule.workers)),
            metrics=self._evaluations.metrics or self._last_metrics(),
            weights_sha256=digest(weights),
        )
        return RunOutcome("finished", [], arrays=weights, final=final)

    def _last_metrics(self) -> dict[str, float | None]:
        """Of an evaluation before this client's time."""
        return dict(self.meter.measured[max(self.meter.measured)]) if self.meter.measured else {}

    # -- functions ------------------------------------------------------------------------------------------

    def _parts(self, at: Served) -> list[Part]:
        """All shares. Attempts follow those of earlier clients."""
        latest: dict[int, int] = {}
        for event in events_of(self._folder):
            if isinstance(event, Invoked):
                latest[event.rank] = max(latest.get(event.rank, -1), event.attempt)
        data: Any = None  # functions open it
        return [
            Part(
                run=self._spec.run_id,
                rank=rank,
                attempt=latest.get(rank, -1) + 1,
                model=self._model,
                dataset=data,
                schedule=self._schedule,
                addresses=at.addresses,
            )
            for rank in range(self._schedule.workers)
        ]

    def _start_part(self, at: Served) -> Any:
        launched: set[int] = set()

        def start(part: Part) -> PartTask:
            reason: Reason = "resume" if part.attempt else "start"
            if part.rank in launched:
                reason = "relay" if part.rank in self._relayed else "replacement"
            launched.add(part.rank)
            return asyncio.ensure_future(self._trained_part(part, reason, at))

        return start

    async def _trained_part(self, part: Part, reason: Reason, at: Served) -> PartReport:
        """Runs one function to its end.

        Raises:
            JobError: the data or the job are wrong.
            FunctionFailed: its code raised.
            FunctionLost: another function is to go on.
        """
        c, s = self._spec.configuration, self._schedule
        request = SparsePartRequest(
            program=self._program,
            batch_size=s.batch_size,
            epochs=s.epochs,
            workers=s.workers,
            seed=s.seed,
            addresses=at.addresses,
            session=part.session,
        )
        call = Call(
            run=self._spec.run_id,
            rank=part.rank,
            attempt=part.attempt,
            memory_mb=c.memory_mb,
            lifetime_s=c.function_timeout_s,
            channel=self._address,
            entry=ENTRY,
            reason=reason,
            origin=self._origin,
            key=self._key.text,
            labels=self._labels,
            request=plain(request),
        )
        invocation = await self._platform.invoke(call)
        try:
            outcome = await invocation.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(PlatformError):
                await invocation.cancel()
            raise
        if outcome.status == "cancelled":
            raise asyncio.CancelledError
        value = outcome.value
        if outcome.status != "ok" or value.get("outcome") == "fenced":
            raise _error_of(outcome, part)
        if value.get("outcome") == "refused":
            raise JobError(str(value["problem"]), remedy=str(value["remedy"]) or None)
        return build(PartReport, value["report"], where="report of a function")

    def ended(self, part: Part, task: PartTask, end: PartEnd, error: str) -> None:
        """Of `ShareWatcher`."""
        (self._relayed.add if end == "handed over" else self._relayed.discard)(part.rank)

    def reported(self, reports: Sequence[PartReport]) -> None:
        """Of `ShareWatcher`."""
        if self._evaluations is not None:
            self._evaluations.reported(reports)

    # -- limits ---------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Looks for requests to stop, and for limits that are reached."""
        told_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() >= told_at + _METER_S:
                told_at = time.monotonic()
                await self._tell_requests()
            reason = self._limit_reached()
            with contextlib.suppress(ChannelError):
                if not reason and await self._control.fetch(Keys(self._spec.run_id).control) is not None:
                    reason = "a client asked for it"
            if reason and not self._requests:
                self.interrupt(reason)
            if self._requests == 1 and time.monotonic() > self._stopped_at + _STOP_S:
                self.interrupt()

    def _limit_reached(self) -> str:
        spec, t = self._spec, self.now()
        if spec.budget_usd is not None and self.meter.cost_usd(t) >= spec.budget_usd:
            return f"the budget of ${spec.budget_usd:g} is spent"
        if spec.time_limit_s is not None and t >= spec.time_limit_s:
            return f"the time limit of {spec.time_limit_s:g} s is reached"
        return ""

    # -- events ---------------------------------------------------------------------------------------------

    async def _tell_requests(self) -> None:
        tested = Traffic() if self._test is None else Traffic(gets=self._test.requests, bytes_down=self._test.nbytes_read)
        traffic = self._shards_traffic() + self._control.traffic + tested
        await self._emit(StoreRequests(t=self.now(), source=f"client-{self._began_at}", traffic=traffic))

    async def _emit(self, event: Event) -> None:
        """Adds an event to the run's log, from which `_read_events` takes it."""
        await self._platform.emit(self._spec.run_id, event)

    async def _tell(self, event: Event) -> None:
        """The same after `_read_events` has ended."""
        self._on_event(event)
        await self._emit(event)

    async def _read_events(self) -> None:
        async for event in self._platform.events(self._spec.run_id):
            self.meter.feed(event)
            self._on_event(event)
            if isinstance(event, Invoked):
                self._running.add(event.invocation)
            elif isinstance(event, Ended):
                self._running.discard(event.invocation)

    async def _all_ended(self) -> None:
        """Waits until the ends of all functions are known."""
        await asyncio.sleep(0.05)  # events of this moment are still on their way
        while self._running:  # noqa: ASYNC110 - events come from another process, which has no event
            await asyncio.sleep(0.02)

    def _started(self) -> RunStarted:
        spec, c, settings = self._spec, self._spec.configuration, self._program.spec
        return RunStarted(
            t=self.now(),
            run_id=spec.run_id,
            job=spec.name,
            workers=c.workers,
            aggregators=0,
            memory_mb=c.memory_mb,
            iterations=max(self._schedule.count(rank) for rank in range(c.workers)),
            epochs=spec.epochs,
            samples=spec.samples,
            configuration={
                "model": settings.model.target,
                **{f"model.{k}": v for k, v in settings.model.options.items()},
                "optimizer": settings.optimizer.target,
                **{f"optimizer.{k}": v for k, v in settings.optimizer.options.items()},
                "pattern": "sparse store",
                "sync": c.sync,
                "shards": len(settings.store) or settings.shards,
                "workers": c.workers,
                "memory_mb": c.memory_mb,
                "batch_size": c.batch_size,
                "compression": settings.values,
                "function_timeout_s": c.function_timeout_s,
                "budget_usd": spec.budget_usd,
                "seed": spec.seed,
            },
            platform=self._platform.name,
            wall_time=self._began_at,
            merges_evaluations=True,
            notes=list(self._platform.unenforced),
        )
