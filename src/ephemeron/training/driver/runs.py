"""Runs that are driven by one event loop, with common limits on functions and budget, and common warm functions."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron import logs
from ephemeron.errors import JobError, PlanInfeasible, UserError
from ephemeron.events import Event, Note
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.simulated import SimulatedPool
from ephemeron.training.driver import lifecycle, notebook, run_dir
from ephemeron.training.driver.cost import CostMeter, servers_of
from ephemeron.training.driver.launch import BegunRun, LaunchRequest, PreparedRun, begun, platform_limits, prepared_run
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.places import Places
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.run_driver import RunOutcome
from ephemeron.training.driver.stop_requests import RunStop

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
        self._folder = run_dir.home() / "sessions" / secrets.token_hex(6)
        self._host: LocalPlatform | None = None
        self._starting = asyncio.Lock()

    @property
    def spent_usd(self) -> float:
        """Cost of all runs so far, as far as their events tell."""
        return sum(self._costs.values())

    async def run(
        self, request: LaunchRequest, stop: RunStop, *, on_event: OnEvent | None, out: Path | None,
        relay: Callable[[OnEvent], OnEvent], show: bool = False,
    ) -> Result:  # fmt: skip
        """Waits for places, then prepares, launches and supervises a run to its end.

        Args:
            request: the run.
            stop: stops it.
            on_event: called with its events; None: nothing is.
            out: folder into which result, weights and report are copied.
            relay: from a callback to one that this loop may call.
            show: in a notebook, show its progress if there is no `on_event`.

        Raises:
            UserError: it is refused, or was not begun.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running[stop] = task
        stop.belongs_to(task)
        try:
            return await self._run(request, stop, on_event, out, relay, show)
        except asyncio.CancelledError:
            if stop.reason:
                raise UserError(f"run of job {request.job.name!r} was not begun: {stop.reason}") from None
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
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _run(
        self, request: LaunchRequest, stop: RunStop, on_event: OnEvent | None, out: Path | None,
        relay: Callable[[OnEvent], OnEvent], show: bool,
    ) -> Result:  # fmt: skip
        if request.configuration.groups:
            raise JobError("a run of several groups is not for a session", remedy="train it with ephemeron.train")
        self._check_budget()
        given = _ignore if on_event is None else relay(on_event)
        places = self._places_for(request)
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
                given = relay(notebook.on_event_in_notebook(ready.prepared.spec.prices))
            with begun(ready, self._metered(ready, given)) as run, logs.context(run=run.folder.run_id):
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
            run.folder, run.record, prepared.spec, run.log.on_event, ready.secrets, stop, prepared=prepared,
            session=await self._hosting(places) if hosted else None,
        )  # fmt: skip

    async def _hosting(self, places: Places) -> Path:
        """Folder of the daemon that hosts functions on this machine; starts it for the first run."""
        from ephemeron.functions.local import LocalPlatform, default_limits

        async with self._starting:
            if self._host is None:
                _sweep(self._folder.parent)
                # Successors and replacements run beside the functions that they follow.
                limits = dataclasses.replace(default_limits(), concurrency=2 * places.limit)
                self._host = await LocalPlatform.start(self._folder, limits=limits, restart=True)
        return self._folder

    def _places_for(self, request: LaunchRequest) -> Places:
        platform = request.configuration.platform
        key = "" if self._max_functions is not None else platform
        if key not in self._places:
            limit = self._max_functions or platform_limits(platform, request.job.simulation).concurrency
            self._places[key] = Places(limit)
        return self._places[key]

    def _check_budget(self) -> None:
        if self._budget_usd is not None and self._budget_is_spent:
            raise PlanInfeasible(f"the session's budget of ${self._budget_usd:g} is spent", binding="budget")

    def _metered(self, ready: PreparedRun, on_event: OnEvent) -> OnEvent:
        """A callback that takes the cost of a run into account. Above the budget, all runs are stopped."""
        spec = ready.prepared.spec
        meter, servers = CostMeter(spec.prices), servers_of(spec)

        def seen(event: Event) -> None:
            on_event(event)
            meter.feed(event)
            self._costs[spec.run_id] = meter.cost_usd(event.t, servers)
            limit = self._budget_usd
            if limit is not None and not self._budget_is_spent and self.spent_usd >= limit:
                self._budget_is_spent = True
                for stop in list(self._running):
                    stop.request(f"the session's budget of ${limit:g} is spent")

        return seen


def _sweep(sessions: Path) -> None:
    """Removes the folders of sessions whose client was killed and whose daemon has ended."""
    from ephemeron.functions.daemon_files import LOCK_FILE
    from ephemeron.functions.local import is_hosted

    for lock in sessions.glob(f"*/{LOCK_FILE}"):
        if time.time() - lock.stat().st_mtime > _STARTS_S and not is_hosted(lock.parent):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _ignore(event: Event) -> None:
    pass
