"""Many runs in one process: `train_async`, and the `Session` that runs share.

async with Session(max_functions=16, budget_usd=2.0) as session:
    results = await asyncio.gather(*(session.train("job.toml", seed=seed, check=False) for seed in range(100)))

All runs are driven by the caller's event loop. Functions on this machine have one daemon and share its warm processes. Simulated
functions are those of one cloud, in one loop of virtual time on a thread of its own. What blocks (loading data, the trial of a
model, the report) is done on one thread, one run after the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from ephemeron.errors import JobError
from ephemeron.events import Event
from ephemeron.functions.simulation.virtual_time import VirtualTimeLoop, VirtualTimeThread
from ephemeron.runs.stop_requests import RunStop
from ephemeron.training.driver.api import Program, launch_request
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.runs import Runs
from ephemeron.training.job import Configuration, Job


async def train_async(
    job: Job | Program,
    configuration: Configuration | None = None,
    *,
    on_event: OnEvent | None = None,
    out: Path | None = None,
    check: bool = True,
    **more: Any,
) -> Result:
    """Trains a job as `train` does, without blocking the event loop.

    Args:
        job, configuration, on_event, out, check, more: as for `train`.

    Raises:
        UserError, RunFailed: as for `train`.
        CancelledError: this call was cancelled. A run that had begun has stopped at a checkpoint, and can be resumed.
    """
    async with Session() as session:
        return await session._train(job, configuration, on_event=on_event, out=out, check=check, show=True, more=more, given={})


class Session:
    """Runs of one process with common limits, warm functions and one bill: an asynchronous context manager.

    At its end, runs that are still there are stopped at a checkpoint. Either all runs are simulated, or none is.

    Args:
        max_functions: functions that all runs together have at once; a run waits until there are places for all of its own.
            Successors and replacements, which run for seconds beside the functions that they follow, are not counted. None: as
            many as each platform has.
        budget_usd: of all runs together. Where it is spent, all runs are stopped at a checkpoint, and no further one begins.
    """

    def __init__(self, *, max_functions: int | None = None, budget_usd: float | None = None) -> None:
        if max_functions is not None and max_functions < 1:
            raise JobError(f"max_functions = {max_functions} is below 1")
        if budget_usd is not None and not budget_usd > 0:
            raise JobError(f"budget_usd = {budget_usd} is not above 0")
        self._thread: ThreadPoolExecutor | None = None
        self._virtual: VirtualTimeThread | None = None
        self._simulated: bool | None = None
        self._closed = False
        self._runs = Runs(max_functions=max_functions, budget_usd=budget_usd, blocking=self._blocking)

    @property
    def spent_usd(self) -> float:
        """Cost of all runs so far, as far as their events tell."""
        return self._runs.spent_usd

    def cost_of(self, run_id: str) -> float:
        """Cost of one of its runs so far; 0 of a run that has not begun."""
        return self._runs.cost_of(run_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def train(
        self,
        job: Job | Program,
        configuration: Configuration | None = None,
        *,
        on_event: OnEvent | None = None,
        out: Path | None = None,
        check: bool = True,
        stop: RunStop | None = None,
        run_id: str | None = None,
        report: bool = True,
        parent: str = "",
        **more: Any,
    ) -> Result:
        """Trains a job as `train` does, beside the other runs of the session.

        Args:
            job, configuration, out, check, more: as for `train`.
            on_event: called in the caller's event loop with every event of the run. A wait for places is a `Note`.
            stop: stops this run; to be asked in the loop that drives it.
            run_id: name of the run, which no other has; None: a new one.
            report: whether to write its report.
            parent: study of which it is a trial.

        Returns:
            The result of a run that has finished, or was stopped at a checkpoint.

        Raises:
            UserError, RunFailed: as for `train`. The session has not enough places, was stopped, or its budget is spent.
            CancelledError: this call was cancelled. A run that had begun has stopped at a checkpoint, and can be resumed.
        """
        given = {"run_id": run_id, "report": report, "parent": parent}
        return await self._train(job, configuration, on_event=on_event, out=out, check=check, show=False, more=more, stop=stop, given=given)

    async def proceed(
        self, run_id: str, *, on_event: OnEvent | None = None, check: bool = True, stop: RunStop | None = None, report: bool = True
    ) -> Result:
        """Goes on with a run whose client has ended, beside the other runs of the session: attaches to its functions, collects
        its result, or resumes it from its checkpoints.

        Args:
            run_id: name of a run that is not simulated.
            on_event: called with every event of the run, old ones first. They count for the session's budget.
            check: raise an error if the run fails; False: return its result.
            stop: stops this run.
            report: whether to write its report.

        Raises:
            RunNotFound: there is no such run.
            UserError, RunFailed: as for `train`, or another client drives the run.
        """
        if self._closed:
            raise JobError("the session has ended", remedy="open another one")
        if self._simulated:
            raise JobError("a session has simulated runs or real ones, not both", remedy="open two sessions")
        self._simulated = False
        result = await self._runs.proceed(run_id, stop or RunStop(), on_event=on_event, report=report)
        return result.raise_if_failed() if check else result

    async def stop(self) -> None:
        """Stops all runs at a checkpoint, and waits for their end."""
        reason = "the session was stopped"
        if self._virtual is None:
            await self._runs.stop(reason)
        else:
            await asyncio.wrap_future(self._virtual.submit(lambda: self._runs.stop(reason)))

    async def close(self) -> None:
        """Stops all runs, and ends warm functions. No further run begins."""
        self._closed = True
        await self.stop()
        await self._runs.close()
        for thread in (self._virtual, self._thread):
            if thread is not None:
                await asyncio.to_thread(thread.close if isinstance(thread, VirtualTimeThread) else thread.shutdown)

    async def _train(
        self,
        job: Job | Program,
        configuration: Configuration | None,
        *,
        on_event: OnEvent | None,
        out: Path | None,
        check: bool,
        show: bool,
        more: dict[str, Any],
        stop: RunStop | None = None,
        given: dict[str, Any],
    ) -> Result:
        request = dataclasses.replace(launch_request(job, configuration, **more), **given)
        simulated = request.configuration.platform == "simulated"
        if self._closed:
            raise JobError("the session has ended", remedy="open another one")
        if self._simulated is not None and self._simulated != simulated:
            raise JobError("a session has simulated runs or real ones, not both", remedy="open two sessions")
        self._simulated = simulated
        stop = stop or RunStop()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Result]
        call: Callable[[Callable[[], None]], None]
        if simulated and not isinstance(loop, VirtualTimeLoop):
            virtual = self._virtual = self._virtual or VirtualTimeThread()

            def relay(callback: OnEvent) -> OnEvent:
                def relayed(event: Event) -> None:
                    loop.call_soon_threadsafe(callback, event)

                return relayed

            ended = asyncio.wrap_future(
                virtual.submit(lambda: self._runs.run(request, stop, on_event=on_event, out=out, relay=relay, show=show))
            )
            call = virtual.call
        else:
            ended = asyncio.ensure_future(
                self._runs.run(request, stop, on_event=on_event, out=out, relay=lambda callback: callback, show=show)
            )
            call = _here
        cancelled = False
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                cancelled = True
                call(stop.request)
        if cancelled:
            if not ended.cancelled():
                ended.exception()  # seen: the caller has given up
            raise asyncio.CancelledError
        result = ended.result()
        return result.raise_if_failed() if check else result

    async def _blocking(self, work: Callable[[], Any]) -> Any:
        """On the session's thread, or here where the loop has no one else to serve."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            return work()
        thread = self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="ephemeron-session")
        return await loop.run_in_executor(thread, contextvars.copy_context().run, work)


def _here(callback: Callable[[], None]) -> None:
    callback()
