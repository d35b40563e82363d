"""Runs that are driven by one event loop, with common limits on functions and budget, and common warm functions."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron import logs
from ephemeron.config.paths import present
from ephemeron.errors import JobError, PlanInfeasible, UserError
from ephemeron.events import Event, Note
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.simulated import SimulatedPool
from ephemeron.runs import folders, verbs
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import RunHeader
from ephemeron.runs.lock import driving as driving_lock
from ephemeron.runs.stop_requests import RunStop
from ephemeron.training.driver import lifecycle, progress, records, run_logging
from ephemeron.training.driver.launching.launch import BegunRun, LaunchRequest, PreparedRun, begun, platform_limits, prepared_run
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.places import Places
from ephemeron.training.driver.result import Result, conclude, open_run
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.job import Simulation
from ephemeron.training.worker.spec import RunSpec

if TYPE_CHECKING:
    from ephemeron.functions.local import LocalPlatform

Blocking = Callable[[Callable[[], Any]], Awaitable[Any]]

_log = logging.getLogger(__name__)

_STARTS_S = 60.0
"""Seconds from the creation of a daemon's lock to its acquisition, at most."""


class Runs:
    """Runs of one event loop.

    Args:
        max_functions: functions of all runs at once; None: as many as each platform has.
        budget_usd: of all runs together; None: no limit.
        blocking: does what blocks, one after the other, and returns what it returns.
    """

    def __init__(self, *, max_functions: int | None, budget_usd: float | None, blocking: Blocking) -> None:
        self._max_functions, self._budget_usd, self._blocking = max_functions, budget_usd, blocking
        self._costs: dict[str, float] = {}
        self._budget_is_spent = False
        self._places: dict[str, Places] = {}
        self._running: dict[RunStop, asyncio.Task[object]] = {}
        self._pool = SimulatedPool()
        self._folder = folders.home() / "sessions" / secrets.token_hex(6)
        self._host: LocalPlatform | None = None
        self._starting = asyncio.Lock()

    @property
    def spent_usd(self) -> float:
        """Cost of all runs so far, as far as their events tell."""
        return sum(self._costs.values())

    def cost_of(self, run_id: str) -> float:
        """Cost of a run so far; 0 of a run that has not begun."""
        return self._costs.get(run_id, 0.0)

    async def run(
        self,
        request: LaunchRequest,
        stop: RunStop,
        *,
        on_event: OnEvent | None,
        out: Path | None,
        relay: Callable[[OnEvent], OnEvent],
        show: bool = False,
    ) -> Result:
        """Waits for places, then prepares, launches and supervises a run to its end.

        Args:
            request: the run.
            stop: stops it.
            on_event: called with its events; None: nothing is.
            out: folder into which result, weights and report are copied.
            relay: from a callback to one that this loop may call.
            show: show its progress if there is no `on_event`.

        Raises:
            UserError: it is refused, or was not begun.
        """
        with self._known(stop, f"run of job {request.job.name!r} was not begun"):
            return await self._run(request, stop, on_event, out, relay, show)

    async def proceed(self, run_id: str, stop: RunStop, *, on_event: OnEvent | None, report: bool) -> Result:
        """Waits for places, then attaches to a run whose client has ended, or resumes it, and supervises it to its end.

        Args:
            run_id: of the run.
            stop: stops it.
            on_event: called with its events, old ones first; None: nothing is.
            report: whether to write its report.

        Raises:
            RunNotFound: there is no such run.
            UserError: it is refused, simulated, or another client drives it.
        """
        folder, record, spec = open_run(run_id)
        known = records.read_result(folder)
        if known is not None and known.status == "finished":
            seen = self._metered(spec, on_event or _ignore)
            for event in events_of(folder):
                seen(event)
            return Result(known, folder)
        self._check_budget()
        places = self._places_of(record.platform, None)
        with self._known(stop, f"run {run_id} was not continued"):
            async with places.taken(spec.configuration.workers, lambda text: _log.info("run %s %s", run_id, text)):
                on_each = self._metered(spec, on_event or _ignore)
                loggers = run_logging.continued(folder, ())
                with driving_lock(folder), run_logging.logged(folder, spec, loggers, on_each) as log:
                    ending, meter = await self._continued(folder, record, spec, stop, log.on_event, places)
                    return log.conclude(await self._blocking(lambda: conclude(folder, spec, meter, ending, None, report=report)))

    async def _continued(
        self, folder: RunFolder, record: RunHeader, spec: RunSpec, stop: RunStop, on_event: OnEvent, places: Places
    ) -> tuple[RunOutcome, CostMeter]:
        once = verbs.OnceEach(on_event)
        try:
            return await lifecycle.drive(folder, record, spec, once.again(), {}, stop, attach=True)
        except UserError as e:
            _log.info("resuming run %s: %s", folder.run_id, e)
        hosted, source = record.platform not in CLOUDS, records.code_source(record)
        return await lifecycle.drive(
            folder,
            record,
            spec,
            once.again(),
            {},
            stop,
            keep_code=source is not None and not all(each.is_dir() for each in source.folders),  # it was launched by a function
            session=await self._hosting(places) if hosted else None,
        )

    @contextmanager
    def _known(self, stop: RunStop, what: str) -> Iterator[None]:
        """Inside, the current task is stopped with all runs."""
        task = asyncio.current_task()
        assert task is not None
        self._running[stop] = task
        stop.belongs_to(task)
        try:
            yield
        except asyncio.CancelledError:
            if stop.reason:
                raise UserError(f"{what}: {stop.reason}") from None
            raise
        finally:
            del self._running[stop]

    async def stop(self, reason: str) -> None:
        """Stops all runs at a checkpoint, and waits for their end."""
        await asyncio.sleep(0)  # those that were just started are then known
        for stop in list(self._running):
            stop.request(reason)
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def close(self) -> None:
        """Ends warm functions. All runs have ended."""
        if self._host is not None:
            await self._host.shutdown()
            self._host = None
        await self._blocking(lambda: shutil.rmtree(self._folder, ignore_errors=True))

    async def _run(
        self,
        request: LaunchRequest,
        stop: RunStop,
        on_event: OnEvent | None,
        out: Path | None,
        relay: Callable[[OnEvent], OnEvent],
        show: bool,
    ) -> Result:
        if request.configuration.regions.given:
            raise JobError("a run in several regions is not for a session", remedy="train it with ephemeron.train")
        self._check_budget()
        given = _ignore if on_event is None else relay(on_event)
        places = self._places_of(request.configuration.platform, request.job.simulation)
        waited = False

        def on_wait(text: str) -> None:
            nonlocal waited
            waited = True
            _log.info("a run of job %s %s", request.job.name, text)
            given(Note(t=0.0, text=f"the run {text}"))

        async with places.taken(request.configuration.workers, on_wait) as wait_s:
            self._check_budget()
            ready: PreparedRun = await self._blocking(lambda: prepared_run(request))
            if waited:
                ready = ready.with_note(f"the run has waited {wait_s:.1f} s for places")
            if show and on_event is None:
                given = relay(progress.shown_progress(ready.prepared.spec.prices))
            with begun(ready, self._metered(ready.prepared.spec, given)) as run, logs.context(run=run.folder.run_id):
                ending, meter = await self._driven(run, stop, places)
                result: Result = await self._blocking(lambda: run.conclude(ending, meter, out))
                return result

    async def _driven(self, run: BegunRun, stop: RunStop, places: Places) -> tuple[RunOutcome, CostMeter]:
        ready, prepared = run.ready, run.ready.prepared
        if ready.simulated:
            return await lifecycle.simulate(
                prepared, run.folder, ready.request.job.simulation, run.log.on_event, stop=stop, pool=self._pool
            )
        hosted = prepared.spec.configuration.platform not in CLOUDS
        return await lifecycle.drive(
            run.folder,
            run.record,
            prepared.spec,
            run.log.on_event,
            ready.secrets,
            stop,
            prepared=prepared,
            session=await self._hosting(places) if hosted else None,
        )

    async def _hosting(self, places: Places) -> Path:
        """Folder of the daemon that hosts functions on this machine; starts it for the first run."""
        from ephemeron.functions.local import SESSION_VARIABLE, LocalPlatform, default_limits

        if given := os.environ.get(SESSION_VARIABLE):
            return Path(given)
        async with self._starting:
            if self._host is None:
                _sweep(self._folder.parent)
                # Successors and replacements run beside the functions that they follow.
                limits = dataclasses.replace(default_limits(), concurrency=2 * places.limit)
                self._host = await LocalPlatform.start(self._folder, limits=limits, restart=True)
        return self._folder

    def _places_of(self, platform: str, world: Simulation | None) -> Places:
        key = "" if self._max_functions is not None else platform
        if key not in self._places:
            limit = self._max_functions or platform_limits(platform, world).concurrency
            self._places[key] = Places(limit)
        return self._places[key]

    def _check_budget(self) -> None:
        if self._budget_usd is not None and self._budget_is_spent:
            raise PlanInfeasible(f"the session's budget of ${self._budget_usd:g} is spent", binding="budget")

    def _metered(self, spec: RunSpec, on_event: OnEvent) -> OnEvent:
        """A callback that takes the cost of a run into account. Above the budget, all runs are stopped."""
        meter = CostMeter(spec.prices, servers=spec.servers)

        def seen(event: Event) -> None:
            on_event(event)
            meter.feed(event)
            self._costs[spec.run_id] = meter.cost_usd(event.t)
            limit = self._budget_usd
            if limit is not None and not self._budget_is_spent and self.spent_usd >= limit:
                self._budget_is_spent = True
                for stop in list(self._running):
                    stop.request(f"the session's budget of ${limit:g} is spent")

        return seen


def _sweep(sessions: Path) -> None:
    """Removes the folders of sessions whose client was killed and whose daemon has ended."""
    from ephemeron.functions.daemon_messages import LOCK_FILE
    from ephemeron.functions.local import is_hosted

    for lock, status in present(sessions.glob(f"*/{LOCK_FILE}")):
        if time.time() - status.st_mtime > _STARTS_S and not is_hosted(lock.parent):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _ignore(event: Event) -> None:
    pass
